"""A report about a folder of LoRAs before building a space: files, compatibility, expected result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from ..loras.base_weights import BaseWeights
from ..loras.gauge import Gauge, gauge_test
from ..loras.lora_files import LoraFile
from ..loras.lora_folders import BadFile, FolderScan, scan_folder
from ..loras.near_copies import Copy, near_copies, sketch, variance_fractions
from ..space.factor_stacks import multiplications
from ..space.space_mode import choose_mode, read_or_problem, some_readable, unlike

NUMBERS = 200_000
"""Numbers stored per LoRA: 16 x 16 of each of SDXL's 700 layers, 79 x 79 of 32."""


@one_line
@dataclass(frozen=True)
class FolderLook:
    """Contents of a folder, and properties of a space built from it.

    Attributes:
        scan: the files, and those left out.
        copies: near-duplicates among the usable files.
        fractions: (N - 1,) estimated fractions of the variance along each principal component of the weight updates.
        mode, reason: mode of the space, and why; empty if fewer than two files are usable.
        gauge: whether factors are comparable.
    """

    scan: FolderScan
    copies: tuple[Copy, ...] = ()
    fractions: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    mode: str = ""
    reason: str = ""
    gauge: Gauge | None = None

    @property
    def effective(self) -> float:
        """Effective number of directions: 1 / sum of squared fractions (participation ratio)."""
        return float(1 / self.fractions.square().sum()) if len(self.fractions) and self.fractions.any() else 0.0

    def delta_cost(self) -> tuple[int, float]:
        """(bytes, multiplications) of a delta space: all factors in float32, and products of all pairs of LoRAs.

        See :func:`~..space.factor_stacks.multiplications`; other steps cost less. A linked space has one layer in
        memory.
        """
        numbers, products = 0, 0.0
        for path, outer in self.scan.shapes.items():
            factors = sum(file.entries[path].down[0] for file in self.scan.good if path in file.entries)
            numbers += factors * sum(outer)
            products += min(multiplications(len(self.scan.good), factors, *outer))
        return 4 * numbers, products

    def largest_layer(self) -> int:
        """Bytes of the factors of all LoRAs in the largest layer."""
        return 4 * max(
            sum(shape) * sum(f.entries[path].down[0] for f in self.scan.good if path in f.entries)
            for path, shape in self.scan.shapes.items()
        )

    def text(self, most: int = 40) -> str:
        """The report as plain text, with at most ``most`` lines each of files, copies and files left out."""
        good, bad = self.scan.good, self.scan.bad
        lines = [self.scan.heading(), "", *_table(good[:most]), *_more(good, most), ""]
        lines += self.scan.notes
        lines += [f"copies: {copy}" for copy in self.copies[:most]] + _more(self.copies, most)
        lines += [f"left out {b.name}: {b.problem}" for b in bad[:most]] + _more(bad, most)
        if self.mode:
            lines += ["", f"a space would be built in mode {self.mode}: {self.reason}"]
        if self.mode == "delta":
            size, products = self.delta_cost()
            layer = f"with --linked one layer's, {self.largest_layer() / 2**30:.2f} GiB"
            lines.append(
                f"it would need {size / 2**30:.2f} GiB of factors in memory ({layer}), and take "
                f"{products:.1e} multiplications in float64"
            )
        if len(self.fractions):
            half, most_of_it = (int((self.fractions.cumsum(0) < s).sum()) + 1 for s in (0.5, 0.9))
            spread = f"half in {half} of {len(self.fractions)} components, 90 % in {most_of_it}"
            lines.append(f"variance (estimated): {spread}; equal to {self.effective:.1f} equally strong directions")
            lines.append(_judged(self.effective, len(self.fractions)))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "files": [_facts(file) for file in self.scan.good],
            "left_out": [asdict(bad) for bad in self.scan.bad],
            "notes": list(self.scan.notes),
            "copies": [copy.to_dict() for copy in self.copies],
            "layers": len(self.scan.shapes),
            "delta_bytes": self.delta_cost()[0],
            "delta_multiplications": self.delta_cost()[1],
            "mode": self.mode,
            "reason": self.reason,
            "gauge": None if self.gauge is None else asdict(self.gauge) | {"shared": self.gauge.shared},
            "variance": [round(v, 5) for v in self.fractions.tolist()],
            "effective": round(self.effective, 2),
        }


def look_at_folder(
    folder: str | Path | Iterable[Path],
    layers_per_block: int = 2,
    memory: int = 2**30,
    progress: Progress = silent,
    headers_only: bool = False,
    base: BaseWeights | None = None,
) -> FolderLook:
    """Describes a folder without building anything; every file is read once, one in memory at a time.

    Args:
        memory: bytes for stored samples of the files; less makes the estimates of copies and variance coarser.
        headers_only: skip copies, variance and mode, which need the tensors.
        base: weights of the base model, for DoRAs.
    """
    scan = scan_folder(folder, layers_per_block, progress, fewest=0, base=base)
    if headers_only or len(scan.good) < 2:
        return FolderLook(scan)
    side = max(2, math.isqrt(min(NUMBERS, memory // 8 // len(scan.good)) // len(scan.shapes)))
    rows, good, bad = [], list[LoraFile](), list(scan.bad)
    for number, file in enumerate(scan.good):
        lora, problem = read_or_problem(file)
        if lora is None:
            bad.append(BadFile(file.path.name, problem))
        else:
            rows.append(sketch(lora, scan.shapes, side))
            good.append(file)
        progress(number + 1, len(scan.good))
    scan = FolderScan(tuple(good), tuple(bad), scan.notes, scan.shapes)
    if len(good) < 2:
        return FolderLook(scan)
    table, gauge = torch.stack(rows), gauge_test(some_readable(good, memory))
    copies = near_copies(table, [file.name for file in good])
    return FolderLook(scan, tuple(copies), variance_fractions(table), *choose_mode("auto", unlike(scan), gauge), gauge)


def _facts(file: LoraFile) -> dict[str, Any]:
    alphas = sorted({entry.alpha for entry in file.entries.values() if entry.alpha is not None})
    return {
        "name": file.name,
        "file": file.path.name,
        "spelling": file.dialect,
        "layers": len(file.entries),
        "ranks": file.ranks,
        "alphas": alphas,
        "dtypes": list(file.dtypes),
        "text_encoder_layers": file.text_layers,
        "dropped": list(file.dropped),
        "base_by_layers": file.shaped_base,
        "base_by_header": file.said_base,
    }


def _table(files: Iterable[LoraFile]) -> list[str]:
    """A line per file, in columns."""
    rows = [("file", "spelling", "layers", "rank", "dtype", "text encoder", "base: by layers / by header")]
    for file in files:
        ranks = str(file.ranks[0]) if len(file.ranks) == 1 else f"{file.ranks[0]} .. {file.ranks[-1]}"
        bases = f"{file.shaped_base or '?'} / {file.said_base or '?'}"
        text = f"{file.text_layers} layers" if file.text_layers else "-"
        rows.append((file.name, file.dialect, str(len(file.entries)), ranks, "+".join(file.dtypes), text, bases))
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(6)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]


def _more(things: tuple, most: int) -> list[str]:
    return [f".. and {len(things) - most} more"] if len(things) > most else []


def _judged(effective: float, most: int) -> str:
    """A judgement of the effective dimension: if every LoRA differs in another direction, sliders cannot be learned."""
    fraction = effective / most
    if fraction > 0.8:
        return "almost every LoRA differs in another direction: new models will be mixtures of a few members"
    if fraction < 0.2:
        return "the LoRAs vary along few common directions: a space can represent them"
    return "some directions are common, many belong to single LoRAs: more LoRAs of one kind make a better space"
