"""What is shipped: the registry's archive points to nothing that it leaves out, and has nothing its scanner hides."""

import importlib.util
import json
import os
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

from vitrine_tests import shipped
from vitrine_tests.forked import imported_anew

ROOT = Path(__file__).parents[1]
CODE = ("__init__.py", "engine/", "nodes/", "locales/", "workflows/", "subgraphs/")
"""What runs, or is read inside ComfyUI. README and CHANGELOG are pages about the repository."""
MEASURED = tuple(f"engine/portraits/weights/{name}" for name in ("plants/", "readout/", "addresses.json"))
"""Of the toy models: what only claims and the command line read."""
SCANNED = {
    "network": r"\.(?:connect|bind|listen|send|sendall|sendto|recv|recvfrom|recv_into)\s*\(|ClientSession"
    r"|create_connection|urlopen|urlretrieve|urllib\.request|http\.client|\brequests\.(?:get|post|Session)\b"
    r"|\bsocket\.|import socket|ftplib|XMLHttpRequest",
    "processes": r"\bsubprocess\b|os\.system|os\.popen|os\.exec|Popen",
    "environment": r"os\.environ|os\.getenv",
    "dynamic code": r"(?<![\w.])(?:eval|exec)\s*\(|__import__|new Function\b|pickle\.load|marshal\.load|import pickle",
    "addresses": r"raw\.githubusercontent\.com",
}
"""What versions are hidden for, by what publishers report of the registry's scanner; comments and texts count."""
POINTER = re.compile(r"(?<![\w/.-])(?:docs|tests|\.github|\.ci)/[\w./-]*\w")


def test_the_scanner_finds_nothing():
    files = shipped.texts(
        shipped.archive() | {n for n in shipped.tracked() if n.startswith((*CODE, "cli/", "evidence/"))}
    )
    hits = [
        (name, kind, match[0])
        for name, text in files.items()
        for kind, pattern in SCANNED.items()
        for match in re.finditer(pattern, text)
    ]
    assert len(files) > 600 and not hits


def test_the_scanner_is_not_blind():
    for line, kind in (
        ("searching.send(x)", "network"),
        ("f.bind (a)", "network"),
        ("x = eval(y)", "dynamic code"),
        ("import subprocess", "processes"),
        ("aiohttp.ClientSession()", "network"),
    ):
        assert re.search(SCANNED[kind], line)
    assert not any(re.search(pattern, "net.eval().requires_grad_(False)") for pattern in SCANNED.values())


def test_the_archive_has_what_runs_and_nothing_else():
    packed, everything = shipped.archive(), shipped.tracked()
    assert {n for n in everything if n.startswith(CODE) and not n.startswith(MEASURED)} <= packed
    assert {"LICENSE", "LICENSES.md", "SECURITY.md", "README.md", "pyproject.toml", "requirements.txt"} <= packed
    left_out = ("tests/", "docs/", "evidence/", "cli/", "results/", ".ci/", ".github/", *MEASURED)
    assert not [n for n in packed if n.startswith(left_out)]
    assert not [n for n in packed if n.endswith((".pt", ".bin", ".ckpt", ".pkl", ".zip", ".sh", ".exe", ".whl"))]


def test_nothing_inside_points_outside():
    """Help pages, messages, tooltips, notes of templates, cards and docstrings name no file that is left out."""
    packed, dead = shipped.archive(), []
    for name, text in shipped.texts({n for n in packed if n.startswith(CODE)}).items():
        for line in text.splitlines():
            if "vitrine.evidence" in line or "pytest tests/" in line:  # a command of a checkout, which writes that file
                continue
            dead += [(name, path) for path in POINTER.findall(line) if path not in packed]
    assert not dead


def test_links_of_the_help_pages_lead_to_files_inside():
    packed, seen = shipped.archive(), 0
    for name, text in shipped.texts(
        {n for n in packed if n.startswith("nodes/web/docs/") and n.endswith(".md")}
    ).items():
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
        for link in (unquote(link).split("#")[0] for link in links):
            if not link or "://" in link:
                continue
            # Pictures and the glossary are addressed from the folder of the pages, also in a translation's subfolder.
            base = ROOT / "nodes/web/docs"
            path = base / link.removeprefix("/") if "vitrine/" in link else base / link
            assert path.resolve().relative_to(ROOT).as_posix() in packed, (name, link)
            seen += 1
    assert seen > 100


def test_templates_name_shipped_files():
    """Files that a template's Load nodes name under the folder of the pack's examples are in the archive."""
    packed = {Path(n).name for n in shipped.archive()}
    for name in (n for n in shipped.archive() if n.startswith("workflows/") and n.endswith(".json")):
        text = json.dumps(json.loads((ROOT / name).read_text(encoding="utf-8")))
        for file in re.findall(r"vitrine[\\/]+([\w. -]+\.(?:json|safetensors|png|jpg))\b", text):
            assert file in packed, (name, file)


METHODS = ("activations", "control", "emd", "nemo", "portraits", "resolution", "w2w")


def loaded(pack):
    """Imports the pack of a folder: (modules of the engine, class of the UNet, names that modules hide, its files)."""
    os.chdir(pack.parent)
    where = {"submodule_search_locations": [str(pack)]}
    spec = importlib.util.spec_from_file_location("vitrine", pack / "__init__.py", **where)
    vitrine = sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vitrine)
    engine = importlib.import_module("vitrine.engine")
    modules = [m.name for m in pkgutil.walk_packages(engine.__path__, "vitrine.engine.")]
    for name in modules:
        importlib.import_module(name)
    packages = [sys.modules[f"vitrine.engine.{name}"] for name in METHODS]
    hidden = [name for each in packages for name in each.__all__ if type(getattr(each, name)) is type(sys)]
    unet = type(vitrine.load_portraits().unet).__name__
    files = {m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "vitrine" and m.__file__}
    return len(modules), unet, hidden, files


def test_the_archive_alone_loads_and_no_module_takes_the_place_of_a_function(tmp_path):
    """A module with the name of a function that its package exports would replace it once it is imported."""
    for name in shipped.archive():
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "pack" / name)
    modules, unet, hidden, files = imported_anew(loaded, tmp_path / "pack")
    assert not hidden, "modules in the place of functions"
    assert modules > 200 and unet == "UNet2DConditionModel"
    assert all(Path(file).is_relative_to(tmp_path) for file in files)
