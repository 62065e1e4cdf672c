"""Labels of models, as text or CSV: a name or pattern, then a number."""

from __future__ import annotations

import fnmatch
from collections import Counter
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
    stems = list(map(_stem, names))
    for line in filter(None, map(str.strip, text.splitlines())):
        pattern, _, number = line.replace(",", " ").replace(":", " ").rpartition(" ")
        pattern = pattern.strip()
        try:
            value = float(number)
        except ValueError:
            raise refuse("label line", line, "a name or pattern, then a number", "write old_* 1") from None
        matches = [i for i, stem in enumerate(stems) if _fits(stem, _stem(pattern))]
        if not matches:
            raise refuse("label line", line, f"names such as {', '.join(stems[:3])}", "check the spelling")
        values[matches] = value
    return values


def _fits(stem: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (stem, Path(stem).name))


def names_in(path: str | Path, count: int) -> tuple[str, ...]:
    """The models' names, from the first column of a table of labels with a row for each model, in their order.

    Args:
        count: how many models there are; 0 where that is unknown, and takes any number.

    Raises:
        VitrineError: If the file is missing, or has another number of rows.
    """
    names = tuple(row[0] for row in _rows(path)[1:])
    if count and len(names) != count:
        raise refuse("labels", f"{Path(path).name}: {len(names)} rows", f"{count}, one a model", "use the whole table")
    return names if count else ()


def read_table(path: str | Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Label -> (N,) from a CSV: the model's name, then one column per label; empty cells are unknown.

    Models may go by their file's name alone where only one has it. Columns without any number, such as file names, are
    left out.

    Raises:
        VitrineError: If the file is missing or has no columns, a cell is not a number, or a name is not in the space.
    """
    rows, file = _rows(path), Path(path).name
    places = _places(stems := list(map(_stem, names)))
    columns = [j for j in range(1, len(rows[0])) if any(_is_number(row[j]) for row in rows[1:] if j < len(row))]
    table = {rows[0][j]: torch.full((len(names),), float("nan")) for j in columns}
    for row in rows[1:]:
        if _stem(row[0]) not in places:
            shown = f"names such as {stems[:3]}" if stems else "names of the space's models, of which it holds none"
            raise refuse("labels", f"{file}: model {row[0]!r}", shown, "remove it")
        for j in columns:
            if j < len(row) and row[j].strip():
                table[rows[0][j]][places[_stem(row[0])]] = _number(file, rows[0][j], row[j])
    return table


def _places(stems: Sequence[str]) -> dict[str, int]:
    """Name -> index; also by the last part of a name, where only one model has it."""
    bases = [Path(stem).name for stem in stems]
    counts = Counter(bases)
    unique = {base: i for i, base in enumerate(bases) if counts[base] == 1}
    return unique | {stem: i for i, stem in enumerate(stems)}


def _rows(path: str | Path) -> list[list[str]]:
    import csv

    path = Path(path)
    if not path.is_file():
        raise refuse("labels", path.name, "a CSV file", "check the path")
    with path.open(newline="", encoding="utf-8") as opened:
        rows = [row for row in csv.reader(opened) if row]
    if len(rows) < 2 or len(rows[0]) < 2:
        raise refuse("labels", f"{path.name}: {len(rows)} rows", "a head row, then one row a model", "name,beard,...")
    return rows


def _stem(name: str) -> str:
    return name.removesuffix(".safetensors")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(file: str, label: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise refuse("labels", f"{file}: {cell!r} for {label}", "numbers", "write 1 and 0, or scores") from None
