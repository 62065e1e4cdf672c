"""Factors of a delta space that stay in the LoRA files: one layer of all of them is read when it is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from .lora_files import LoraFile, read_header, read_lora
from .lora_folders import one_form
from .stacks import Stack

_TAIL = 65_536
"""Bytes at a file's end by which it is known again, beside its size."""


class LinkedStacks(Mapping[str, Stack]):
    """Layer path -> :class:`~.stacks.Stack`, read anew each time; only one layer need be held.

    Args:
        files: of the members, in their order, with 1 x 1 projections in one form.

    Raises:
        VitrineError: If one is a DoRA, which would need its base model at every reading.
    """

    def __init__(self, files: Sequence[LoraFile], layers_per_block: int = 2) -> None:
        self.files, self.layers_per_block = tuple(files), layers_per_block
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
        for file, rank in zip(self.files, ranks, strict=True):
            end += rank
            if rank:
                layer = read_lora(file, only=(path,))[path]
                down[end - rank : end] = layer.down
                up[:, end - rank : end] = (layer.up * layer.scale).flatten(1)
        return Stack(down, up, torch.tensor(ranks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def header(self, space: Path) -> dict[str, Any]:
        """What a space file keeps of the files: where they are from its folder, and how they are known again."""
        folder = space.resolve().parent
        rows = [[_from(folder, file.path.resolve()), *_known(file.path)] for file in self.files]
        return {"files": rows, "layers_per_block": self.layers_per_block}

    @classmethod
    def of_header(cls, header: Mapping[str, Any], space: Path) -> LinkedStacks:
        """Opens what :meth:`header` says.

        Raises:
            VitrineError: If a file is missing or is another one.
        """
        files, layouts, layers = [], dict[tuple, dict](), int(header["layers_per_block"])
        for place, size, digest in header["files"]:
            path = space.resolve().parent / place
            if not path.is_file() or _known(path) != (size, digest):
                state = "is another file" if path.is_file() else "is missing"
                shown = f"linked to {place}, which {state}"
                raise refuse("space", shown, "the LoRAs it was built from", "put them back, or build it anew")
            file = read_header(path, layers)
            files.append(replace(file, entries=layouts.setdefault(tuple(file.entries.items()), file.entries)))
        return cls(one_form(files), layers)


def _from(folder: Path, path: Path) -> str:
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive
        return path.as_posix()


def _known(path: Path) -> tuple[int, str]:
    """A file's size and a hash of its end."""
    size = path.stat().st_size
    with path.open("rb") as opened:
        opened.seek(max(0, size - _TAIL))
        return size, hashlib.blake2b(opened.read(), digest_size=8).hexdigest()
