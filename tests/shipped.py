"""Which files of the repository are shipped: in the registry's archive, and in the wheel."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _git(*arguments: str) -> set[str]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", *arguments]
    return set(
        filter(None, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"))
    )


def tracked() -> set[str]:
    """Every file of the repository, as a path from its root."""
    return {name for name in _git() if (ROOT / name).is_file()}


def archive() -> set[str]:
    """The files that ``comfy node publish`` packs: those of the repository that .comfyignore does not leave out."""
    return tracked() - _git("--cached", "--ignored", "--exclude-from=.comfyignore")


def texts(names: set[str]) -> dict[str, str]:
    """Those of the files that are text, with their content."""
    read = {}
    for name in sorted(names):
        try:
            read[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return read
