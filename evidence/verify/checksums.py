"""SHA-256 of the measured model's and data's files, read in pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ...engine.errors import refuse
from ...engine.io.files import named, parse_table, write_json

_PIECE = 2**22
_WEIGHTS = (".safetensors", ".bin")


def sha256_of(path: str | Path) -> str:
    """Of a file of any size, with 4 MiB in memory; of a folder, of its files' names and sums."""
    path = Path(path)
    if path.is_dir():
        files = (p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith("."))
        lines = (f"{p.relative_to(path).as_posix()}\0{sha256_of(p)}\n" for p in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    if not path.is_file():
        raise refuse("file", str(path), "an existing file or folder", "check the path")
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def model_files(model: str | Path) -> list[Path]:
    """The files with a model's weights: one file, or those in the folders that its model_index.json names."""
    model = Path(model)
    if model.is_file():
        return [model]
    index = model / "model_index.json"
    with named(index, "model", "a pipeline folder with a model_index.json", "check the path"):
        parts = parse_table(index.read_text(encoding="utf-8"))
    files: list[Path] = []
    for part in sorted(parts):
        folder = model / part
        weights = [p for p in sorted(folder.glob("*")) if p.suffix in _WEIGHTS] if folder.is_dir() else []
        files += [p for p in weights if p.suffix == ".safetensors"] or weights
    return files


class Checksums:
    """Checksums, cached while a file's size and modification time are unchanged.

    Args:
        path: of the JSON file of the cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list] = {}
        if path.is_file():
            with named(path, "checksums", "what an earlier run left", "delete the file"):
                self._known = parse_table(path.read_text(encoding="utf-8"))

    def of(self, path: Path) -> str:
        """The sum of a file or folder."""
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        state = json.dumps([[p.name, *_state(p)] for p in files])
        seen = hashlib.sha256(state.encode()).hexdigest()
        key = str(path.absolute())
        if self._known.get(key, [""])[0] != seen:
            self._known[key] = [seen, sha256_of(path)]
            write_json(self.path, self._known)
        return str(self._known[key][1])

    def table(self, paths: Iterable[Path], root: Path) -> dict[str, str]:
        """Path relative to ``root`` -> sum."""
        return {_name(p, root): self.of(p) for p in paths}


def _state(path: Path) -> tuple[int, int]:
    entry = path.stat()
    return entry.st_size, entry.st_mtime_ns


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) and path != root else path.name
