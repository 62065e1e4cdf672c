"""Work folders and state files have one owner at a time: a second process is refused.

The lock is the operating system's (``filelock``, which torch brings), so it ends with its process however that ends;
on a shared disk it holds where the system locks that.
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
FILES = (".safetensors", ".json")
"""Endings of a state that is one file; the place of any other is a folder."""


@contextmanager
def sole_owner(place: str | Path) -> Iterator[None]:
    """Around work that keeps its state in ``place``: a folder, made if it is missing, or a file, if it has an ending.

    Raises:
        VitrineError: If another process, or another thread of this one, works there; its process id is named.
    """
    from filelock import FileLock, Timeout

    place = Path(place)
    folder = place.parent if place.suffix in FILES else place
    folder.mkdir(parents=True, exist_ok=True)
    before = f".{place.name}" if place.suffix in FILES else ""
    lock, note = FileLock(str(folder / f"{before}{LOCK}")), folder / f"{before}{NOTE}"
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        shown = f"{place.name}, in use by {_owner(note)}"
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
