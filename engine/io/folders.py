"""What is in a folder: hidden names left out, links followed but never in a circle, endings in any case."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def hidden(name: str) -> bool:
    """Whether a file or folder is one that systems and programs keep for themselves: ``._a.png``, ``.DS_Store``."""
    return name.startswith(".") or name == "__MACOSX"


def has_ending(path: str | Path, endings: str | Sequence[str]) -> bool:
    """Whether a name ends so, in any case of its letters."""
    return Path(path).name.lower().endswith((endings,) if isinstance(endings, str) else tuple(endings))


def files_in(folder: str | Path, endings: str | Sequence[str], deep: bool = False) -> list[Path]:
    """Files of a folder with one of the endings (lower case), sorted; an empty list where there is no such folder.

    Args:
        deep: those of its subfolders too, each real folder once.
    """
    paths = []
    for where, names in walk(folder) if deep else _flat(Path(folder)):
        paths += [where / name for name in names if has_ending(name, endings)]
    return sorted(paths)


def folders_in(folder: str | Path) -> list[Path]:
    """Folders in a folder, sorted, links to folders too; an empty list where there is no such folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(p for name in names if not hidden(name) and (p := Path(folder) / name).is_dir())


def walk(folder: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """(folder, names of its files) of a folder and all below it; each real folder once, however it is linked."""
    seen: set[str] = set()
    waiting = [Path(folder)]
    while waiting:
        where = waiting.pop(0)
        real = os.path.realpath(where)
        if real in seen:
            continue
        seen.add(real)
        yield from _flat(where)
        waiting += folders_in(where)


def _flat(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield folder, sorted(name for name in names if not hidden(name) and (folder / name).is_file())
