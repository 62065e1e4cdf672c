"""What stands where on the gallery's sheets, so that other pictures are cut from them by name and never by place.

A sheet holds all that a workflow shows, a row for each *Preview Image*, under its title; a row that does not fit moves
on, so places change with any row before. ``pictures/sheets.json``, written by make_gallery.py, keeps the boxes:
``{sheet: [[row's title, [[left, top, width, height], ...]], ...]}``.
"""

import json
import re
from functools import cache
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
PLACES = DOCS / "pictures" / "sheets.json"

Box = tuple[int, int, int, int]
"""Left, top, width and height, pixels of the sheet."""


def slug(title: str) -> str:
    """File name of a template's sheet in docs/pictures: without "(demo)" at its end."""
    return re.sub(r"\W+", "_", re.sub(r" \([^)]*\)$", "", title).lower())


@cache
def sheet(title: str) -> Image.Image:
    """A template's sheet."""
    return Image.open(DOCS / "pictures" / f"{slug(title)}.jpg").convert("RGB")


@cache
def _places() -> dict[str, list[tuple[str, list[Box]]]]:
    return json.loads(PLACES.read_text(encoding="utf-8"))


def pictures(title: str, row: str) -> list[Box]:
    """The pictures of a template's row; of two rows of one title, the first.

    Raises:
        KeyError: If the template shows no such row.
    """
    rows = _places()[slug(title)]
    for name, boxes in rows:
        if name == row:
            return boxes
    raise KeyError(f"{title} shows {[name for name, _ in rows]}, not {row!r}")


TITLED = (1552, 544, 32, 512)
"""Of Compare Copies (NEMO): size of its picture, of the titles, and the side of each of its three squares."""


def squares(title: str, row: str) -> list[Box]:
    """The row cut into squares: two for a picture that shows a sample beside its mask or its match."""
    return [square for box in pictures(title, row) for square in _squares_of(*box)]


def _squares_of(x: int, y: int, w: int, h: int) -> list[Box]:
    width, height, line, side = TITLED
    if abs(w / h - width / height) < 0.01:
        scale, count, step = w / width, 3, (width - side) / 2 * w / width
        y, size = y + round(line * scale), round(side * scale)
    else:
        count, step, size = max(1, round(w / h)), min(w, h), min(w, h)
    return [(x + round(k * step), y, size, size) for k in range(count)]


def crop(image: Image.Image, *boxes: Box) -> Image.Image:
    """The part of a sheet from the first box to the last."""
    left, top = min(x for x, *_ in boxes), min(y for _, y, *_ in boxes)
    return image.crop((left, top, max(x + w for x, _, w, _ in boxes), max(y + h for _, y, _, h in boxes)))
