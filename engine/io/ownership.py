"""Work folders and state files have one owner at a time: a second process is refused.

The lock is the operating system's (``filelock``, which torch installs), so it ends with its process, even a killed one.
On a shared disk it works if the file system supports such locks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import refuse
from .files import parse_table, write_json

LOCK, NOTE = ".owner.lock", ".owner.json"


def is_file(path: Path) -> bool:
    """Whether a path stands for a state that is one file; any other is a folder."""
    return path.suffix == ".safetensors"


@contextmanager
def sole_owner(path: str | Path) -> Iterator[None]:
    """Owns ``path`` while the block is open: a folder, created if missing, or a file, if it has the suffix of one."""
    from filelock import FileLock, Timeout

    path = Path(path)
    folder = path.parent if is_file(path) else path
    folder.mkdir(parents=True, exist_ok=True)
    before = f".{path.name}" if is_file(path) else ""
    lock, note = FileLock(str(folder / f"{before}{LOCK}")), folder / f"{before}{NOTE}"
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        shown = f"{path.name}, in use by {_owner(note)}"
        raise refuse(
            "work folder", shown, "a folder that no other process uses", "wait for that process, or stop it"
        ) from error
    try:
        write_json(note, {"process": os.getpid(), "machine": platform.node()})
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _owner(note: Path) -> str:
    try:
        owner = parse_table(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # about to be written, or just removed
        return "another process"
    return f"process {owner.get('process')} on {owner.get('machine')}"
