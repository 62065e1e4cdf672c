"""Files and folders that are being written: their names say by whom, so that what a killed process left is deleted."""

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
"""Ending of a file or folder that is being written; :func:`sweep` deletes those of killed processes."""
_STALE_SECONDS = 3600.0
"""After so long nobody writes such a file any more, where its process cannot be asked."""


def temporary_path(path: Path) -> Path:
    """Where what will be ``path`` is written, in the same folder: the name says by which process of which machine."""
    return path.parent / f"{_beginning(path.name)}{_machine()}-{os.getpid():x}-{secrets.token_hex(4)}{TEMPORARY}"


def sweep(folder: str | Path, name: str = "", below: bool = False) -> None:
    """Deletes the temporary files that killed processes left in a folder; files being written now stay.

    Args:
        name: of the file they were to become; empty: any.
        below: also in the folders below it.
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
    """Of a temporary file's name; file systems bound names at 255 bytes."""
    return f".{name[:40]}."


def _machine() -> str:
    """This machine, or this container on it, whose process numbers are its own."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{platform.node()} {numbers}".encode()).hexdigest()[:8]


def _left_behind(path: Path) -> bool:
    """Whether the process that wrote it is gone; of another machine's, and on Windows, whether it is an hour old."""
    machine, _, process = path.name.removesuffix(TEMPORARY).rpartition(".")[2].partition("-")
    try:
        if machine == _machine() and sys.platform != "win32":
            os.kill(int(process.partition("-")[0], 16), 0)
            return False
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    except (ProcessLookupError, FileNotFoundError):
        return True
    except (PermissionError, ValueError):  # somebody else's process
        return False
