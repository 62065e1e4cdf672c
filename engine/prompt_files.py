"""Lists of prompts from files: CSV as people and papers keep them, or a text file with one prompt a line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from .errors import refuse
from .files import named

_COLUMNS, _LABELS = ("prompt", "caption", "text"), ("label", "type")


def read_prompts(path: str | Path) -> tuple[list[str], list[str]]:
    """(prompts, labels) of a CSV or text file; no labels where there is no such column.

    A CSV has a column prompt, caption or text, and may have one label or type (NeMo's authors write VM and TM there),
    separated by commas, semicolons or tabs.

    Raises:
        VitrineError: If there is no such file, it is no text, or it has no prompts.
    """
    path = Path(path)
    if not path.is_file():
        raise refuse("prompt file", str(path), "a CSV or text file", "check the path")
    with named(path, "prompt file", "a CSV or text file in UTF-8", "save it as UTF-8"):
        text = path.read_text(encoding="utf-8-sig")
        rows = [[line] for line in text.splitlines()] if path.suffix.lower() != ".csv" else _rows(text)
    head = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = next((head.index(name) for name in _COLUMNS if name in head), None)
    body = rows if column is None else rows[1:]
    pairs = [(row[column or 0].strip(), row) for row in body if len(row) > (column or 0)]
    pairs = [(prompt, row) for prompt, row in pairs if prompt]
    if not pairs:
        raise refuse("prompt file", f"{path.name}, no prompts", f"a column {' or '.join(_COLUMNS)}", "add prompts")
    place = None if column is None else next((head.index(name) for name in _LABELS if name in head), None)
    labels = [] if place is None else [row[place].strip() if len(row) > place else "" for _, row in pairs]
    return [prompt for prompt, _ in pairs], labels


def _rows(text: str) -> list[list[str]]:
    """Cells; the separator is what the first line has most of: comma, semicolon or tab.

    Rows end where CSV says: a caption between quotes may have lines of its own, and unusual line separators in it.
    """
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
