"""Prompt lists from text files, tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import refuse
from .files import named, parse_json
from .tables import bare, lines_of, read_text, rows_of

ENDINGS = {
    "text": ("", ".txt", ".text", ".list", ".lst", ".prompts", ".caption"),
    "table": (".csv",),
    "tabbed table": (".tsv", ".tab"),
    "json": (".json",),
    "json lines": (".jsonl", ".ndjson"),
}
_COLUMNS, _LABELS = ("prompt", "caption", "text"), ("label", "type")
_ACCEPTED = "text with one prompt a line, CSV, TSV, JSON or JSONL"

Pairs = tuple[list[str], list[str]]


def read_prompts(path: str | Path, least: int = 1) -> Pairs:
    """(prompts, labels) of a file; labels are empty if the file has none.

    A text file has one prompt per line. A table has a column prompt, caption or text, and may have a column label or
    type (the NeMo authors write VM and TM there), separated by commas, semicolons or tabs; without a header it has one
    column. JSON is a list of texts, or of objects with these keys; JSONL has one of them per line.

    Args:
        least: the smallest number of prompts.
    """
    path = Path(path)
    if not path.is_file():
        raise refuse("prompt file", str(path), _ACCEPTED, "check the path")
    form = next((form for form, endings in ENDINGS.items() if path.suffix.lower() in endings), None)
    if form is None:
        raise refuse("prompt file", path.name, _ACCEPTED, "save it as one of these, with an ending that says which")
    with named(path, "prompt file", f"{_ACCEPTED}, in UTF-8", "name the column prompt, save it as UTF-8"):
        pairs = _READERS[form](read_text(path))
        prompts, labels = pairs
        kept = [i for i, prompt in enumerate(prompts) if prompt]
        if len(kept) < least:
            accepted = f"{least} or more; in a table, in a column {' or '.join(_COLUMNS)}"
            raise refuse("prompt file", f"{path.name}, {len(kept) or 'no'} prompts", accepted, "add prompts")
        return [prompts[i] for i in kept], [labels[i] for i in kept] if labels else []


def _text(text: str) -> Pairs:
    lines = lines_of(text)
    cells = [cell.strip().lower() for cell in lines[0].replace(";", ",").replace("\t", ",").split(",")] if lines else []
    if set(cells) & set(_COLUMNS) and set(cells) & set(_LABELS):
        raise ValueError(f"begins with {lines[0]!r}, as a table does: name it .csv")
    if text.lstrip()[:1] in ("[", "{") and _is_json(text):
        raise ValueError("is JSON: name it .json")
    return lines[1:] if len(cells) == 1 and cells[0] in _COLUMNS else lines, []  # a table of one column


def _is_json(text: str) -> bool:
    try:
        return isinstance(parse_json(text), (list, dict))
    except ValueError:
        return False


def _table(text: str, separators: str = ",;\t") -> Pairs:
    rows = rows_of(text, separators)
    head = [bare(cell).lower() for cell in rows[0]] if rows else []
    column = _column(head, _COLUMNS)
    if column is None and len(head) > 1:
        raise ValueError(f"several columns, {', '.join(head)[:80]}, none of them {' or '.join(_COLUMNS)}")
    body, label = rows if column is None else rows[1:], _column(head, _LABELS)
    prompts = [_cell(row, column or 0) for row in body]
    return prompts, [] if label is None or column is None else [_cell(row, label) for row in body]


def _column(head: Sequence[str], names: Sequence[str]) -> int | None:
    name = next((name for name in names if name in head), None)
    if name is not None and head.count(name) > 1:
        raise ValueError(f"{head.count(name)} columns called {name}")
    return None if name is None else head.index(name)


def _cell(row: Sequence[str], index: int) -> str:
    return bare(row[index]) if index < len(row) else ""


def _json(text: str) -> Pairs:
    tree = parse_json(text)
    if not isinstance(tree, list):
        raise ValueError(f"expected a list, not a {type(tree).__name__}")
    return _entries(tree)


def _json_lines(text: str) -> Pairs:
    return _entries([parse_json(line) for line in lines_of(text)])


def _entries(entries: Sequence[Any]) -> Pairs:
    pairs = [_entry(entry) for entry in entries]
    labels = [label for _, label in pairs]
    return [prompt for prompt, _ in pairs], ["" if v is None else v for v in labels] if any(labels) else []


def _entry(entry: Any) -> tuple[str, str | None]:
    """The prompt of one entry of JSON, and its label, if any."""
    if isinstance(entry, str):
        return bare(entry), None
    if not isinstance(entry, dict):
        raise ValueError(f"{str(entry)[:60]!r} is neither a text nor an object with one of {', '.join(_COLUMNS)}")
    prompt = next((entry[name] for name in _COLUMNS if name in entry), None)
    label = next((entry[name] for name in _LABELS if name in entry), None)
    if not isinstance(prompt, str) or not isinstance(label, (str, int, float, type(None))):
        raise ValueError(f"an object with {', '.join(map(str, entry))[:60]}: no text called {' or '.join(_COLUMNS)}")
    return bare(prompt), None if label is None else str(label)


_READERS: dict[str, Callable[[str], Pairs]] = {
    "text": _text,
    "table": _table,
    "tabbed table": partial(_table, separators="\t"),
    "json": _json,
    "json lines": _json_lines,
}
