"""Factors of a delta space that stay in the LoRA files: one layer of all files is read on demand."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...errors import VitrineError, printable, refuse
from ...io.files import named, open_artefact, parse_table
from ...io.folders import has_ending
from ...io.number_checks import integer
from ..loras.lora_files import LoraFile, read_header, read_lora
from ..loras.lora_folders import one_form
from .factor_stacks import Stack
from .space import KIND, LINKED_VERSION

_PIECES, _PIECE = 256, 1024
"""A file is identified by that many pieces of that many bytes, evenly spaced: all of a file up to 256 kB."""
MOST_LAYERS, MOST_FILES = 99, 1 << 20
"""Per block of a UNet, and of a linked space."""
_DIGITS = 32
"""Of the hash of these pieces."""


class LinkedStacks(Mapping[str, Stack]):
    """Layer path -> :class:`~.factor_stacks.Stack`, read again in each access; only one layer is in memory.

    Args:
        files: of the training LoRAs, in order, with 1 x 1 projections in one form.
    """

    def __init__(self, files: Sequence[LoraFile], layers_per_block: int = 2) -> None:
        self.files, self.layers_per_block = tuple(files), layers_per_block
        self._written = [_written(file.path) for file in files]
        tables = {id(f.entries): f.entries for f in files}.values()
        self._paths = sorted({path for entries in tables for path in entries})
        for file in files:
            if any(entry.decomposed for entry in file.entries.values()):
                shown = f"{file.path.name}, a DoRA"
                raise refuse("linked space", shown, "LoRAs that need no base model", "build it without linked")

    def __getitem__(self, path: str) -> Stack:
        if path not in self._paths:
            raise KeyError(path)
        entries = [file.entries.get(path) for file in self.files]
        ranks = [entry.down[0] if entry else 0 for entry in entries]
        form = next(entry for entry in entries if entry)
        down, up = torch.zeros(sum(ranks), *form.down[1:]), torch.zeros(form.up[0], sum(ranks))
        end = 0
        for file, rank, written in zip(self.files, ranks, self._written, strict=True):
            end += rank
            if rank:
                if _written(file.path) != written:
                    shown = f"linked to {file.path.name}, which was replaced since the space was opened"
                    raise refuse("space", shown, "the LoRAs it was built from", "put it back, or build the space anew")
                layer = read_lora(file, only=(path,))[path]
                down[end - rank : end] = layer.down
                up[:, end - rank : end] = (layer.up * layer.scale).flatten(1)
        return Stack(down, up, torch.tensor(ranks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def header(self, space: Path) -> dict[str, Any]:
        """The header entry of a space file: relative paths of the files, and what identifies them."""
        rows = [[relative_path(space, file.path), *_known(file.path)] for file in self.files]
        return {"files": rows, "layers_per_block": self.layers_per_block}

    @classmethod
    def of_header(cls, header: Mapping[str, Any], space: Path, folders: Sequence[str | Path] = ()) -> LinkedStacks:
        """Opens the files of a :meth:`header`.

        Args:
            folders: further folders with the LoRAs, see :func:`~..building.build_space.load_space`.
        """
        files, layouts = [], dict[tuple, dict]()
        layers, links = _links(header)
        for link, size, digest in links:
            path = linked_file(space, link, folders)
            if not path.is_file() or _known(path) != (size, digest):
                state = "is another file" if path.is_file() else "is missing"
                shown = f"linked to {link}, which {state}"
                raise refuse("space", shown, "the LoRAs it was built from", "put them back, or build it again")
            file = read_header(path, layers)
            files.append(replace(file, entries=layouts.setdefault(tuple(file.entries.items()), file.entries)))
        return cls(one_form(files), layers)

    def check_header(self, header: Mapping[str, Any], space: Path) -> None:
        """Checks that a space file with this :meth:`header` finds these files again."""
        folders = {file.path.parent for file in self.files}
        with named(space, "linked space", "files that can be found again", "rename them, or build without linked"):
            for file, (link, *_) in zip(self.files, _links(header)[1], strict=True):
                if not os.path.samefile(linked_file(space, link, tuple(folders)), file.path):
                    raise ValueError(f"{file.path.name} is not found at {link}")


def _links(header: Mapping[str, Any]) -> tuple[int, list[tuple[str, int, str]]]:
    """Layers per block, and path, size and hash of each file in a header."""
    layers = integer(header["layers_per_block"], "layers per block", 1, MOST_LAYERS)
    integer(len(header["files"]), "linked files", 2, MOST_FILES)
    sized = [(link, integer(size, "size of a linked file"), digest) for link, size, digest in header["files"]]
    return layers, sized


def linked_file(space: Path, link: str, folders: Sequence[str | Path] = ()) -> Path:
    """The path of a linked LoRA, if it is in an allowed folder; nothing is opened.

    A space may be untrusted. Its LoRAs are therefore only looked for in its own folder, in a folder ``loras`` in or
    above it, and in ``folders``; links in these folders may lead elsewhere.
    """
    plain = isinstance(link, str) and not set(link) & set("\\:") and printable(link) == link
    usable = plain and not Path(link).is_absolute() and has_ending(link, ".safetensors")
    own = Path(os.path.abspath(space.parent))
    listed = [Path(os.path.abspath(folder)) for folder in folders] + [Path(folder).resolve() for folder in folders]
    target = Path(os.path.normpath(own / link)) if usable else own.parent
    if not any(target.is_relative_to(f) for f in (own, *(above / "loras" for above in own.parents), *listed)):
        shown = f"linked to {printable(str(link))}, outside its folder"
        accepted = "LoRAs in the space's folder, or in a folder loras next to or above it"
        raise refuse("space", shown, accepted, "put the space's file into the LoRAs' folder, or next to it")
    return target


def relative_path(space: Path, path: Path) -> str:
    """The path of a file relative to the folder of a space file."""
    try:
        return Path(os.path.relpath(path, space.parent)).as_posix()
    except ValueError:  # another drive
        return path.as_posix()


def _known(path: Path) -> tuple[int, str]:
    """A file's size and a hash of pieces of it."""
    size, content = path.stat().st_size, hashlib.blake2b(digest_size=_DIGITS // 2)
    whole = size <= _PIECES * _PIECE
    starts = range(0, size, _PIECE) if whole else [i * (size - _PIECE) // (_PIECES - 1) for i in range(_PIECES)]
    with path.open("rb") as opened:
        for start in starts:
            opened.seek(start)
            content.update(opened.read(_PIECE))
    return size, content.hexdigest()


def _written(path: Path) -> tuple[int, int, int] | None:
    """When and as which file it was written; None where it is gone."""
    try:
        entry = path.stat()
    except OSError:
        return None
    return entry.st_size, entry.st_mtime_ns, entry.st_ino


def linked_files(space: str | Path, folders: Sequence[str | Path] = ()) -> list[Path]:
    """The LoRAs of a linked space's file, by its header alone; none where it is another space, or is broken."""
    try:
        _, header = open_artefact(space, KIND, LINKED_VERSION)
        table = parse_table(header["linked"])
        return [linked_file(Path(space), row[0], folders) for row in table["files"]]
    except (VitrineError, ValueError, LookupError, TypeError):
        return []
