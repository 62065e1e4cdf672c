"""The pack as a wheel: built from the tree and from the sdist, installed beside nothing but its dependencies."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".venv")
pytest.importorskip("setuptools", minversion="77", reason="builds without isolation, with the environment's own")

QUESTIONS = """
import importlib.resources, json, sys
import vitrine
from vitrine.engine.activations import TapConfig
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import student_file
root = importlib.resources.files("vitrine")
print(json.dumps({
    "file": vitrine.__file__, "module": TapConfig.__module__, "student": student_file().is_file(),
    "unet": type(load_portraits().unet).__name__,
    "languages": sorted(p.name for p in (root / "locales").iterdir() if p.is_dir()),
    "help": len(list((root / "nodes/web/docs").iterdir())), "workflows": len(list((root / "workflows").iterdir())),
    "typed": (root / "py.typed").is_file(),
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
    return tuple(next((work / name).glob("vitrine-*.whl")) for name in ("tree", "sdist"))


@pytest.mark.nightly
def test_both_wheels_hold_the_same_files(built):
    tree, sdist = (set(zipfile.ZipFile(w).namelist()) for w in built)
    assert tree == sdist
    code = {f"vitrine/{p.relative_to(ROOT)}" for folder in ("engine", "nodes") for p in (ROOT / folder).rglob("*.py")}
    data = {f"vitrine/{p.relative_to(ROOT)}" for p in (ROOT / "locales").rglob("*.json")}
    data |= {f"vitrine/{p.relative_to(ROOT)}" for p in (ROOT / "nodes/web").rglob("*.md")}
    assert code | data <= tree
    assert all(name.startswith(("vitrine/", "vitrine-")) for name in tree)
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
    assert Path(told["file"]).is_relative_to(own) and told["module"] == "vitrine.engine.activations.config"
    assert told["languages"] == ["en", "ja", "ko", "zh"] and told["typed"] and told["student"]
    assert told["help"] >= 26 and told["workflows"] >= 3 and told["unet"] == "UNet2DConditionModel"
    assert "reproduce" in run(python.parent / "vitrine", "--help", cwd=tmp_path)
