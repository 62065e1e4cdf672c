"""Labels of models, as text or CSV: a name or pattern, then a number."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import refuse
from ...io.files import named
from ...io.folders import has_ending
from ...io.tables import lines_of, read_text, rows_of
from .space_checks import check_text


def parse_labels(text: str, names: Sequence[str]) -> torch.Tensor:
    """(N,) numbers from lines ``name-or-pattern number``; later lines take precedence, NaN without a match.

    Name and number are separated by a comma, a colon or blanks.
    """
    values = torch.full((len(names),), math.nan)
    stems, models = list(map(_stem, names)), dict[str, list[int]]()
    for i, stem in enumerate(stems):
        for name in {stem, Path(stem).name}:
            models.setdefault(name, []).append(i)
    for line in lines_of(text):
        pattern, _, number = line.replace(",", " ").replace(":", " ").rpartition(" ")
        pattern = _stem(pattern.strip())
        value = _as_number(number)
        if value is None or not math.isfinite(value):
            raise refuse("label line", line, "a name or pattern, then a number", "write old_* 1")
        fitting = [pattern] if pattern in models else [name for name in models if fnmatch.fnmatchcase(name, pattern)]
        matches = [i for name in fitting for i in models[name]]
        if not matches:
            raise refuse("label line", line, f"names such as {', '.join(stems[:3])}", "check the spelling")
        values[matches] = value
    return values


def names_in(path: str | Path, count: int) -> tuple[str, ...]:
    """The models' names in order, from the first column of a label table with a row per model.

    The header row is optional if ``count`` is given.

    Args:
        count: number of models; 0 if unknown, which accepts any number.
    """
    rows = _rows(path)
    bare = len(rows) == count and all(_as_number(cell) is not None for cell in rows[0][1:] if cell.strip())
    names = tuple(row[0] for row in (rows if bare else rows[1:]))
    if count and len(names) != count:
        raise refuse("labels", f"{Path(path).name}: {len(names)} lines", f"{count}, one a model", "use the whole table")
    return names if count else ()


def read_table(path: str | Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Label -> (N,) from a table: the model's name, then one column per label; empty cells are unknown.

    Models may be given by their file name alone if it is unique. Columns without any number, such as file names, are
    ignored. Cells are separated by commas, semicolons or tabs.
    """
    rows, file = _rows(path), Path(path).name
    indices = _indices(stems := list(map(_stem, names)))
    labels = [cell.strip() for cell in rows[0]]
    if _stem(labels[0]) in indices:
        raise refuse(
            "labels", f"{file}: first line {labels[0]!r}, a model", "a header line that names the labels", _HEAD
        )
    columns = [
        j for j in range(1, len(labels)) if any(_as_number(row[j]) is not None for row in rows[1:] if j < len(row))
    ]
    chosen = [labels[j] for j in columns]
    for label in chosen:
        with named(path, "labels", "names of columns in plain text", _HEAD):
            check_text(label, "a label")
    if "" in chosen or len(set(chosen)) < len(chosen):
        raise refuse("labels", f"{file}: columns {chosen}", "a different name per column", _HEAD)
    table, seen = {label: torch.full((len(names),), math.nan) for label in chosen}, set[int]()
    for row in rows[1:]:
        index = indices.get(_stem(row[0].strip()))
        if index is None or index in seen:
            shown = f"names such as {stems[:3]}" if stems else "names of the space's models, of which it has none"
            problem = f"{file}: model {row[0]!r}" + ("" if index is None else " a second time")
            raise refuse("labels", problem, shown if index is None else "one vector for each model", "remove it")
        seen.add(index)
        for j in columns:
            if j < len(row) and row[j].strip():
                table[labels[j]][index] = _number(file, labels[j], row[j])
    return table


def _indices(stems: Sequence[str]) -> dict[str, int]:
    """Name -> index; also by the last part of a name, if it is unique."""
    bases = [Path(stem).name for stem in stems]
    counts = Counter(bases)
    unique = {base: i for i, base in enumerate(bases) if counts[base] == 1}
    return unique | {stem: i for i, stem in enumerate(stems)}


def _rows(path: str | Path) -> list[list[str]]:
    path = Path(path)
    if not path.is_file():
        raise refuse("labels", path.name, "a CSV file", "check the path")
    with named(path, "labels", "a table in UTF-8: a header line, then one line for each model", "save it as CSV"):
        rows = rows_of(read_text(path))
    if len(rows) < 2 or len(rows[0]) < 2:
        raise refuse("labels", f"{path.name}: {len(rows)} lines", "a header line, then one line for each model", _HEAD)
    return rows


_HEAD = "write name,beard,..."


def _stem(name: str) -> str:
    return name[: -len(".safetensors")] if has_ending(name, ".safetensors") else name


def _as_number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _number(file: str, label: str, cell: str) -> float:
    value = _as_number(cell)
    if value is None or not math.isfinite(value):
        raise refuse("labels", f"{file}: {cell!r} for {label}", "finite numbers", "write 1 and 0, or scores")
    return value
