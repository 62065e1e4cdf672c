"""Folder listings: without hidden names, following links once, suffixes in any case."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def hidden(name: str) -> bool:
    """Whether a name is hidden, such as ``._a.png`` or ``.DS_Store``."""
    return name.startswith(".") or name == "__MACOSX"


def has_ending(path: str | Path, endings: str | Sequence[str]) -> bool:
    """Whether a name has one of the suffixes, ignoring case."""
    return Path(path).name.lower().endswith((endings,) if isinstance(endings, str) else tuple(endings))


def files_in(folder: str | Path, endings: str | Sequence[str], deep: bool = False) -> list[Path]:
    """Files of a folder with one of the suffixes (lower case), sorted; empty if the folder does not exist.

    Args:
        deep: include subfolders, each real folder once.
    """
    paths = []
    for where, names in walk(folder) if deep else _flat(Path(folder)):
        paths += [where / name for name in names if has_ending(name, endings)]
    return sorted(paths)


def folders_in(folder: str | Path) -> list[Path]:
    """Subfolders of a folder, sorted, including links to folders; empty if the folder does not exist."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(p for name in names if not hidden(name) and (p := Path(folder) / name).is_dir())


def walk(folder: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """(folder, names of its files) of a folder and all subfolders, each real folder once."""
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
