"""The neighbours of one LoRA: near-duplicates and merges in a folder, and its position in a space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import VitrineError, printable
from ...io.lora_layer import Lora
from ...runtime.progress import Progress, silent
from ..edit.coefficient_sampling import nearest
from ..loras.lora_files import LoraFile, read_lora
from ..loras.lora_folders import distinct_names, scan_folder
from ..loras.merges import Merge, merge_of
from ..loras.near_copies import Copy, near_copies, sketch
from ..space.delta_space import Space
from ..space.space_mode import read_or_problem
from .folder_summary import NUMBERS
from .lora_encoding import encode

MOST_FILES = 300
"""Most files that are compared with one LoRA, the first by name."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of one LoRA.

    Attributes:
        compared: number of LoRAs of the same base model that it was compared with.
        left_out: number of files that could not be compared: of another base model, or not readable as a LoRA.
        copies: pairs of near-duplicates that it is in.
        merge: the weighted sum of others that it equals, if any.
        alike: (name, cosine of weight updates) of the nearest, at most five.
        space: a description of its position in a space; empty without one.
    """

    compared: int = 0
    left_out: int = 0
    copies: tuple[Copy, ...] = ()
    merge: Merge | None = None
    alike: tuple[tuple[str, float], ...] = ()
    space: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        merge = None if self.merge is None else {"parts": self.merge.parts, "residual": self.merge.residual}
        return {
            "compared": self.compared, "left_out": self.left_out, "copies": [copy.to_dict() for copy in self.copies],
            "merge": merge, "alike": [[name, round(cosine, 4)] for name, cosine in self.alike], "space": self.space,
        }  # fmt: skip


def neighbours_in(
    file: LoraFile, others: Sequence[Path], space: Space | None = None, progress: Progress = silent
) -> Neighbours:
    """Neighbours of a LoRA among other files; each is read once, one in memory at a time."""
    own = read_lora(file)
    position = "" if space is None else _position(space, file, own)
    paths = [p for p in others if p.resolve() != file.path.resolve()][:MOST_FILES]
    scan = scan_folder([file.path, *paths], fewest=0)
    usable = [f for f in scan.good if f.path != file.path]
    if file.path not in {f.path for f in scan.good}:  # most others are of another base model
        return Neighbours(0, len(paths), space=position)
    shapes = {path: entry.outer for path, entry in file.entries.items()} | scan.shapes
    side = max(2, min(64, math.isqrt(NUMBERS // len(shapes))))
    row, rows, names = sketch(own, shapes, side), [], []
    for number, other in enumerate(usable):
        lora, _ = read_or_problem(other)
        if lora is not None:
            rows.append(sketch(lora, shapes, side))
            names.append(other.name)
        progress(number + 1, len(usable))
    if not rows:
        return Neighbours(0, len(paths), space=position)
    table = torch.stack(rows)
    name = next(f.name for f in scan.good if f.path == file.path)
    pairs = near_copies(torch.cat([row[None], table]), [name, *names])
    copies = tuple(pair for pair in pairs if name in (pair.first, pair.second))
    twins = {n for pair in copies for n in (pair.first, pair.second)}
    kept = [i for i, n in enumerate(names) if n not in twins]
    merge = merge_of(row, table[kept], name, [names[i] for i in kept]) if kept else None
    cosines = torch.nn.functional.cosine_similarity(table, row[None])
    order = cosines.argsort(descending=True)[:5].tolist()
    alike = tuple((names[i], float(cosines[i])) for i in order)
    return Neighbours(len(rows), len(paths) - len(rows), copies, merge, alike, position)


def _position(space: Space, file: LoraFile, lora: Lora) -> str:
    try:
        encoded = encode(space, lora, file.name)
    except VitrineError as error:
        return f"not a model of the space: {error}"
    (near,) = nearest(space, encoded.model.coefficients)
    closest = f"; nearest training model {near[0].name}, cosine {near[0].cosine:.2f}" if near else ""
    return printable(encoded.summary(space).split("\n")[0] + closest)


def files_to_compare(files: Sequence[Path], folder: Path | None) -> list[Path]:
    """Files to compare with: of a folder and its subfolders, or of the report."""
    from ...io.folders import files_in

    paths = list(files) if folder is None else [*files_in(folder, ".safetensors", deep=True), *files]
    return list({p.resolve(): p for p in paths}.values())


def names_of(files: Sequence[Path]) -> list[str]:
    """A unique name per file of a report."""
    names = [printable(name).replace("/", " ") for name in distinct_names(list(files))]
    return [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
