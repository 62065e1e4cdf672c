"""Work folders have one owner at a time: a second process is refused, also on a shared disk where the system locks it.

The lock is the operating system's (``filelock``, which torch brings), so it ends with its process however that ends.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import refuse
from .files import parse_table, write_json

LOCK, NOTE = ".owner.lock", ".owner.json"


@contextmanager
def sole_owner(folder: str | Path) -> Iterator[None]:
    """Around work that keeps its state in ``folder``, which is made if it is missing.

    Raises:
        VitrineError: If another process, or another thread of this one, works there; its process id is named.
    """
    from filelock import FileLock, Timeout

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(str(folder / LOCK)), folder / NOTE
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        shown = f"{folder.name}, in use by {_owner(note)}"
        raise refuse("work folder", shown, "a folder of its own", "wait for that process, or stop it") from error
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
