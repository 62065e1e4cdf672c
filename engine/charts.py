"""Line charts and bars for reports, drawn with Pillow: no plotting library has to be installed for a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import refuse

if TYPE_CHECKING:
    from PIL.Image import Image

COLORS = ((63, 120, 158), (214, 119, 41), (84, 150, 84), (161, 48, 155), (120, 120, 120), (190, 60, 60))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 320, 64, 16, 34, 46
Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], title: str, x_label: str, y_label: str) -> Image:
    """One line with markers for each series of (x, y) points, with a legend; axes span the data.

    Raises:
        VitrineError: no points, or a point that is not finite.
    """
    from PIL import Image, ImageDraw

    points = [p for line in series.values() for p in line]
    if not points or any(not -1e300 < v < 1e300 for p in points for v in p):
        raise refuse("chart", f"{len(points)} points", "finite points", "leave out what could not be measured")
    (x0, x1), (y0, y1) = (_span([p[i] for p in points]) for i in (0, 1))
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(picture)

    def place(p: tuple[float, float]) -> tuple[float, float]:
        right = _LEFT + (p[0] - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        return right, _HEIGHT - _BOTTOM - (p[1] - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    for i in range(5):
        x, y = x0 + (x1 - x0) * i / 4, y0 + (y1 - y0) * i / 4
        draw.line([place((x0, y)), place((x1, y))], fill=(225, 225, 225))
        draw.text((_LEFT - 6, place((x0, y))[1]), f"{y:.3g}", fill="black", anchor="rm")
        draw.text((place((x, y0))[0], _HEIGHT - _BOTTOM + 6), f"{x:.3g}", fill="black", anchor="mt")
    for i, line in enumerate(series.values()):
        color = COLORS[i % len(COLORS)]
        placed = [place(p) for p in line]
        if len(placed) > 1:
            draw.line(placed, fill=color, width=2)
        for px, py in placed:
            draw.ellipse([px - 3, py - 3, px + 3, py + 3], fill=color)
    corner, anchor = _emptiest([place(p) for line in series.values() for p in _dense(line)], 14 * len(series))
    for i, name in enumerate(series):
        draw.text((corner[0], corner[1] + 14 * i), name, fill=COLORS[i % len(COLORS)], anchor=anchor)
    draw.text((_LEFT, 8), title, fill="black")
    draw.text((_WIDTH // 2, _HEIGHT - 18), x_label, fill="black", anchor="mt")
    draw.text((6, 16), y_label, fill=(90, 90, 90))
    return picture


def _dense(line: Points) -> list[tuple[float, float]]:
    """The line's points and some between them."""
    steps = [(a, b, i / 8) for a, b in zip(line, line[1:], strict=False) for i in range(8)]
    return [*line, *((a[0] + (b[0] - a[0]) * w, a[1] + (b[1] - a[1]) * w) for a, b, w in steps)]


def _emptiest(placed: Sequence[tuple[float, float]], height: int) -> tuple[tuple[int, int], str]:
    """Where the legend covers least: its upper corner in pixels and the text's anchor."""
    corners = [((x, y), anchor) for y in (_TOP, _HEIGHT - _BOTTOM - height - 4)
               for x, anchor in ((_WIDTH - _RIGHT - 4, "rt"), (_LEFT + 4, "lt"))]  # fmt: skip

    def covered(place: tuple[tuple[int, int], str]) -> int:
        (x, y), anchor = place
        left = x - 228 if anchor == "rt" else x - 8
        return sum(left <= px <= left + 236 and y - 4 <= py <= y + height + 4 for px, py in placed)

    return min(corners, key=covered)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
