"""The distribution is vitrine-diffusion: nothing tells anyone to install ``vitrine``, which is another project's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from vitrine.cli.main import main
from vitrine.engine.io import packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BY_NAME = re.compile(
    r"(?:pip|pipx|uvx?|uv pip|comfy node|node) (?:install|add|run)[^\n`|;&]*?(?<![\w./-])vitrine(?![\w-])", re.I
)
REQUIRED = re.compile(r"(?<![\w./-])vitrine\[\w")


def texts():
    """Every text file of the repository, path -> text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_nothing_installs_another_project():
    assert BY_NAME.search("pip install -U 'vitrine[demo]'") and BY_NAME.search("comfy node install vitrine")
    assert not BY_NAME.search("pip install -U 'vitrine-diffusion[demo]'") and not BY_NAME.search(
        "pip install . && vitrine"
    )
    found = [(name, m[0]) for name, text in texts() for m in [*BY_NAME.finditer(text), *REQUIRED.finditer(text)]]
    assert not found


def test_templates_name_this_distribution():
    """ComfyUI-Manager looks a template's missing nodes up by this name, which is the registry's."""
    names = set()
    for name, text in texts():
        if name.endswith(".json"):
            names |= set(re.findall(r'"cnr_id": "([^"]+)"', text))
    assert names - {"comfy-core"} == {packages.DISTRIBUTION}


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == f"{packages.DISTRIBUTION} {PROJECT['version']}" == f"{packages.DISTRIBUTION} {packages.version()}"
    )
    assert {line.split()[0] for line in lines[1:]} == {"Python", "torch", "diffusers", "transformers"}
    assert all(re.fullmatch(r"\S+ (?:\d\S*|not installed)", line) for line in lines[1:])


def test_a_checkout_has_its_version_without_an_installed_distribution(monkeypatch):
    """As a clone in ComfyUI's folder, whose artefacts said version 0."""
    monkeypatch.setattr(packages, "installed", lambda distribution: None)
    assert packages.version() == PROJECT["version"]


def test_a_missing_package_is_installed_from_the_clone(monkeypatch, capsys):
    """The name on an index would need a release there."""
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["addresses"]) == 2
    assert "pip install torch '.[demo]' in the folder of the clone" in capsys.readouterr().err


def installed(folder, name, entry):
    made = folder / name
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.split('-')[0]}\nVersion: 0.1.5\n")
    (made / "entry_points.txt").write_text(f"[console_scripts]\nvitrine = {entry}\n")
    return folder


def said(*folders):
    """What a fresh process says on stderr as it imports this pack, with folders on the path."""
    path = os.pathsep.join(map(str, folders))
    load = f"""
import importlib.util, sys
where = {{"submodule_search_locations": [{str(ROOT)!r}]}}
spec = importlib.util.spec_from_file_location("vitrine", {str(ROOT / "__init__.py")!r}, **where)
sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["vitrine"])
"""
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True, env=env).stderr


def test_another_projects_vitrine_is_named(tmp_path):
    theirs = installed(tmp_path / "theirs", "vitrine-0.1.5.dist-info", "vitrine.main:app")
    says = said(theirs)
    assert str(theirs) in says and "vitrine-diffusion" in says and len(says.splitlines()) == 1
