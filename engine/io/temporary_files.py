"""Temporary files and folders: names carry the process, so that those of killed processes can be deleted."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import sys
import time
from pathlib import Path

TEMPORARY = ".tmp-vitrine"
"""Suffix of a file or folder that is being written; :func:`sweep` deletes those of killed processes."""
_STALE_SECONDS = 3600.0
"""Age after which a file counts as abandoned if its process cannot be checked."""


def temporary_path(path: Path) -> Path:
    """The temporary path of ``path`` in the same folder; the name carries the process and the machine."""
    return path.parent / f"{_beginning(path.name)}{_machine()}-{os.getpid():x}-{secrets.token_hex(4)}{TEMPORARY}"


def sweep(folder: str | Path, name: str = "", below: bool = False) -> None:
    """Deletes the temporary files that killed processes left in a folder; files being written now stay.

    Args:
        name: only temporary files of this target; empty: any.
        below: also in subfolders.
    """
    folder, beginning = Path(folder), _beginning(name) if name else "."
    present = folder.rglob("*") if below else folder.iterdir()
    temporary = [p for p in present if p.name.startswith(beginning) and p.name.endswith(TEMPORARY)]
    for leftover in filter(_left_behind, temporary):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _beginning(name: str) -> str:
    """Prefix of a temporary name, short enough for names of at most 255 bytes."""
    return f".{name[:40]}."


def _machine() -> str:
    """Identifies this machine or container, within which process ids are unique."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{platform.node()} {numbers}".encode()).hexdigest()[:8]


def _left_behind(path: Path) -> bool:
    """Whether its process has ended; for other machines and on Windows, whether it is an hour old."""
    machine, _, process = path.name.removesuffix(TEMPORARY).rpartition(".")[2].partition("-")
    try:
        if machine == _machine() and sys.platform != "win32":
            os.kill(int(process.partition("-")[0], 16), 0)
            return False
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    except (ProcessLookupError, FileNotFoundError):
        return True
    except (PermissionError, ValueError):  # another user's process
        return False
