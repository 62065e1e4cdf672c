"""Text files and tables with byte order marks, any line ends, and any separator that spreadsheets write."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import readable
from .files import check_regular

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""
_INVISIBLE = (
    "".join(map(chr, range(33)))
    + "\x7f\x85\xa0\u1680\u2028\u2029\u3000\ufeff"
    + "".join(map(chr, [*range(0x2000, 0x2010), *range(0x202A, 0x2030), *range(0x205F, 0x2065)]))
)
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)
"""The optional first line that gives Excel a file's separator."""


LARGEST_TEXT = 1 << 28
"""Bytes of a text file that is read."""


def read_text(path: str | Path) -> str:
    """A text file, UTF-8 unless its byte order mark says otherwise, with ``\\n`` line ends. Call it inside ``named``.

    Raises:
        OSError: If the file does not exist.
        ValueError: If it is not text.
    """
    data = check_regular(path, LARGEST_TEXT).read_bytes()
    mark, encoding = next(((m, e) for m, e in _MARKS if data.startswith(m)), (b"", "utf-8"))
    text = data[len(mark) :].decode(encoding)
    if "\0" in text:
        raise ValueError("contains zero bytes: not text, or UTF-16 without a byte order mark")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines_of(text: str) -> list[str]:
    """The non-empty lines of a text, stripped. Only line feeds end a line.

    Other characters that Unicode calls separators, such as U+2028, belong to the line.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [line for line in map(bare, lines) if line]


def bare(text: str) -> str:
    """A text without spaces and invisible marks at its ends.

    Byte order marks remain inside concatenated files, zero-width spaces and direction marks come with copied text, and
    text encoders read them all.
    """
    return text.strip(_INVISIBLE)


def rows_of(text: str, separators: str = ",;\t") -> list[list[str]]:
    """Rows of cells of a table, without empty rows. A quoted cell may contain line breaks.

    The separator is given by a line ``sep=;`` before the table, else the most frequent one of the first line.

    Raises:
        ValueError: If a quote is never closed, or a row has more cells than the first.
    """
    said = _SEPARATOR_LINE.match(text)
    text = text[said.end() :] if said else text
    first = re.sub(r'"[^"]*"', "", text.lstrip("\n").split("\n", 1)[0])
    separator = said[1] if said else max(separators, key=first.count)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        rows = [row for row in table if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    for row in rows:
        while len(row) > len(rows[0]) and not row[-1].strip():
            row.pop()
        if len(row) > len(rows[0]):
            kind = SEPARATORS.get(separator, repr(separator))
            raise ValueError(f"a row of {len(row)} cells below one of {len(rows[0])}: {row[0][:40]!r} ... ({kind})")
    return rows


# --- writing ----------------------------------------------------------------------------------------------------------
_FORMULAS = ("=", "+", "-", "@", "\t")


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV: a text that a spreadsheet would compute gets an apostrophe in front, control characters are escaped.

    Example:
        >>> csv_text([["=1+1", "-0.5", "a cat"]])
        "'=1+1,-0.5,a cat\\n"
    """
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([_quoted(cell) for cell in row] for row in rows)
    return table.getvalue()


def _quoted(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    shown = readable(cell)
    number = re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", shown)
    return f"'{shown}" if shown.startswith(_FORMULAS) and not number else shown
