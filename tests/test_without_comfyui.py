"""Where ComfyUI or what it requires is not installed, every file of tests/comfy imports and skips with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMFY = Path(__file__).parent / "comfy"
BLOCKED = """
import sys

NAMES = {"aiohttp", "yarl", "torchsde", "av", "alembic", "sqlalchemy", "einops", "kornia", "spandrel", "torchvision",
         "torchaudio", "pydantic", "pydantic_settings", "simpleeval", "blake3", "OpenGL", "sentencepiece",
         "comfy_kitchen", "comfy_aimdo", "comfyui_frontend_package", "comfyui_workflow_templates",
         "comfyui_embedded_docs"}


class Without:
    # A finder that finds all but these, as where they are not installed.

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""A plugin of pytest: ComfyUI's requirements that Vitrine does not bring cannot be imported."""


@pytest.fixture
def checkout(tmp_path):
    """As far as the tests look for one."""
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    (folder / "main.py").touch()
    needed = ["torch", "torchsde", "torchvision", "aiohttp>=3.11.8", "", "#non essential dependencies:", "kornia"]
    (folder / "requirements.txt").write_text("\n".join(needed))
    return folder


def test_every_file_imports_and_skips_with_the_reason(tmp_path, checkout):
    """All are imported, two are run: nodes in the process itself, and the page."""
    (tmp_path / "blocked.py").write_text(BLOCKED)
    own = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "COMFYUI_PATH": str(checkout)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "blocked", "-p", "no:cacheprovider"]
    command += ["-k", "test_captions or test_curve", str(COMFY)]
    ended = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    skipped = [line for line in ended.stdout.splitlines() if line.startswith("SKIPPED")]
    reason = f"torchsde, aiohttp of {checkout / 'requirements.txt'}"
    assert skipped and all(reason in line for line in skipped) and " passed" not in ended.stdout, ended.stdout
    assert {"test_captions.py" in line for line in skipped} == {True, False}


def test_the_first_reason_is_that_there_is_no_checkout(tmp_path, checkout):
    from vitrine_tests.comfy.conftest import why_not

    assert why_not(tmp_path / "nowhere") == f"no ComfyUI checkout in {tmp_path / 'nowhere'}: set COMFYUI_PATH"
    (checkout / "requirements.txt").write_text("torch\nnumpy>=1.25.0\npyyaml\n")
    assert why_not(checkout) is None
