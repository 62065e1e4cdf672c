"""The pack as a wheel: built from the tree and from the sdist, installed in a fresh environment, and used there."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".venv")
pytest.importorskip("setuptools", minversion="77", reason="builds without isolation, with the environment's own")

QUESTIONS = """
import importlib.resources, json, sys
import vitrine
from vitrine import NEMOPipeline, load_space
from vitrine.engine.activations import TapConfig
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import student_file
root = importlib.resources.files("vitrine")
print(json.dumps({
    "file": vitrine.__file__, "module": TapConfig.__module__, "student": student_file().is_file(),
    "unet": type(load_portraits().unet).__name__,
    "languages": sorted(p.name for p in (root / "locales").iterdir() if p.is_dir()),
    "help": len(list((root / "nodes/web/docs").iterdir())), "workflows": len(list((root / "workflows").iterdir())),
    "typed": (root / "py.typed").is_file(), "short": [NEMOPipeline.__module__, load_space.__module__],
}))
"""


def run(*command, cwd=None, **more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "PIP_"))}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=clean | more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel made from the tree, wheel made from the sdist)."""
    work = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, work / "a-hyphenated-folder", ignore=LEFT_OUT)
    tree, pip = work / "a-hyphenated-folder", (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index")
    build = f"import setuptools.build_meta as b; print(b.build_sdist({str(work)!r}))"
    made = run(sys.executable, "-c", build, cwd=tree)
    for name, source in (("tree", tree), ("sdist", work / made.splitlines()[-1])):
        run(*pip, "--no-build-isolation", "-w", work / name, source)
    return tuple(next((work / name).glob("vitrine_diffusion-*.whl")) for name in ("tree", "sdist"))


def test_the_metadata_names_this_project(tmp_path):
    """Without the weights and pictures, which take most of a build's time."""
    code = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "tests", "docs", "weights", "web", "*.jpg")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=code)
    build = f"import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    folder = tmp_path / run(sys.executable, "-c", build, cwd=tmp_path / "tree").splitlines()[-1]
    told = HeaderParser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))
    assert folder.name == f"vitrine_diffusion-{told['Version']}.dist-info" and told["Name"] == "vitrine-diffusion"
    assert {"diffusers", "demo", "probe", "test", "docs", "dev"} == set(told.get_all("Provides-Extra"))
    assert not [need for need in told.get_all("Requires-Dist") if need.replace(";", " ").split()[0] == "vitrine"]
    assert told["License-Expression"] == "Apache-2.0" and "LICENSES.md" in told.get_all("License-File")
    assert "vitrine = vitrine.cli.main:main" in (folder / "entry_points.txt").read_text()


@pytest.mark.nightly
def test_both_wheels_hold_the_same_files(built):
    tree, sdist = (set(zipfile.ZipFile(w).namelist()) for w in built)
    assert tree == sdist
    code = {
        f"vitrine/{p.relative_to(ROOT)}" for folder in ("engine", "nodes", "cli") for p in (ROOT / folder).rglob("*.py")
    }
    data = {f"vitrine/{p.relative_to(ROOT)}" for p in (ROOT / "locales").rglob("*.json")}
    data |= {f"vitrine/{p.relative_to(ROOT)}" for p in (ROOT / "nodes/web").rglob("*.md")}
    assert code | data <= tree
    assert {"vitrine/evidence/demo.py", "vitrine/evidence/reproduce.py", "vitrine/evidence/statements.json"} <= tree
    assert not [n for n in tree if n.startswith(("vitrine/tests/", "vitrine/docs/", "vitrine/evidence/recipes/"))]
    assert all(name.startswith(("vitrine/", "vitrine_diffusion-")) for name in tree)
    assert not [n for n in tree if "/tests/" in n or n.endswith((".pyc", ".pt", ".bin", ".ckpt"))]


@pytest.mark.nightly
def test_an_installed_wheel_works_away_from_the_tree(built, tmp_path):
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", built[0])
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Dependencies from this environment, after the fresh one's own; its .pth files (an editable install) do not run.
    (own / "outer.pth").write_text("\n".join(path for path in sys.path if any(Path(path).glob("*.dist-info"))))
    told = json.loads(run(python, "-c", QUESTIONS, cwd=tmp_path, OMP_NUM_THREADS="1").splitlines()[-1])
    assert Path(told["file"]).is_relative_to(own) and told["module"] == "vitrine.engine.activations.tap_config"
    assert told["languages"] == ["en", "ja", "ko", "zh"] and told["typed"] and told["student"]
    assert told["help"] >= 26 and told["workflows"] >= 3 and told["unet"] == "UNet2DConditionModel"
    assert told["short"] == ["vitrine.engine.pipelines.nemo", "vitrine.engine.w2w.building.build_space"]
    assert "reproduce" in run(python.parent / "vitrine", "--help", cwd=tmp_path)
    assert run(python.parent / "vitrine", "--version", cwd=tmp_path).startswith(
        built[0].name.split("-")[0].replace("_", "-")
    )
