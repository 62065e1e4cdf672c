"""Labels of models, as text or CSV: a name or pattern, then a number."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import refuse


def parse_labels(text: str, names: Sequence[str]) -> torch.Tensor:
    """(N,) numbers from lines ``name-or-pattern number``; later lines win, NaN where no line matches.

    Name and number are separated by a comma, a colon or blanks.

    Raises:
        VitrineError: If a line has no number, or matches no model.
    """
    values = torch.full((len(names),), float("nan"))
    stems = [Path(n).name.removesuffix(".safetensors") for n in names]
    for line in filter(None, map(str.strip, text.splitlines())):
        pattern, _, number = line.replace(",", " ").replace(":", " ").rpartition(" ")
        pattern = pattern.strip()
        try:
            value = float(number)
        except ValueError:
            raise refuse("label line", line, "a name or pattern, then a number", "write old_* 1") from None
        matches = [i for i, stem in enumerate(stems) if fnmatch.fnmatchcase(stem, pattern.removesuffix(".safetensors"))]
        if not matches:
            raise refuse("label line", line, f"names such as {', '.join(stems[:3])}", "check the spelling")
        values[matches] = value
    return values


def read_table(path: str | Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Label -> (N,) from a CSV: the model's name, then one column per label; empty cells are unknown.

    Raises:
        VitrineError: If the file is missing or has no columns, a cell is not a number, or a name is not in the space.
    """
    import csv

    path = Path(path)
    if not path.is_file():
        raise refuse("labels", path.name, "a CSV file", "check the path")
    with path.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.reader(opened))
    if len(rows) < 2 or len(rows[0]) < 2:
        raise refuse("labels", f"{path.name}: {len(rows)} rows", "a head row, then one row a model", "name,beard,...")
    stems = {Path(n).name.removesuffix(".safetensors"): i for i, n in enumerate(names)}
    table = {label: torch.full((len(names),), float("nan")) for label in rows[0][1:]}
    for row in rows[1:]:
        stem = row[0].removesuffix(".safetensors")
        if stem not in stems:
            raise refuse("labels", f"{path.name}: model {row[0]!r}", f"names such as {list(stems)[:3]}", "remove it")
        for label, cell in zip(rows[0][1:], row[1:], strict=False):
            if cell.strip():
                table[label][stems[stem]] = _number(path.name, label, cell)
    return table


def _number(file: str, label: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise refuse("labels", f"{file}: {cell!r} for {label}", "numbers", "write 1 and 0, or scores") from None
