"""One curve as an image, drawn with Pillow, so that nodes in ComfyUI need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import refuse

if TYPE_CHECKING:
    from PIL.Image import Image

_COLOR, _CHOSEN, _GRID, _LIMIT = (63, 120, 158), (208, 72, 40), (225, 225, 225), (150, 110, 40)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 320, 64, 24, 34, 46


def curve_picture(
    points: Sequence[tuple[float, float]],
    title: str,
    x_label: str,
    y_label: str,
    names: Sequence[str] = (),
    chosen: int | None = None,
    limit: tuple[float, str] | None = None,
    upwards_to: Sequence[float] = (),
) -> Image:
    """A line with a marker at each (x, y) point, 560 x 320 pixels; axes end at round values.

    Args:
        names: of the points, written next to them; none: no words.
        chosen: the point whose marker stands out.
        limit: an x value that is marked by an upright line, and its name.
        upwards_to: y values that the axis holds besides.
    """
    from PIL import Image, ImageDraw

    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise refuse("chart", f"{len(points)} points", "finite points", "leave out what could not be measured")
    across, upwards = (list(values) for values in zip(*points, strict=True))
    across += [limit[0]] if limit else []
    upwards += upwards_to
    x_ticks, y_ticks = (_ticks(min(values), max(values)) for values in (across, upwards))
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(picture)

    def pixel(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    for y in y_ticks:
        draw.line([pixel(x_ticks[0], y), pixel(x_ticks[-1], y)], fill=_GRID)
        draw.text((_LEFT - 6, pixel(x_ticks[0], y)[1]), f"{y:g}", fill="black", anchor="rm")
    for x in x_ticks:
        draw.text((pixel(x, 0)[0], _HEIGHT - _BOTTOM + 6), f"{x:g}", fill="black", anchor="mt")
    if limit:
        top, bottom = (pixel(limit[0], y) for y in (y_ticks[-1], y_ticks[0]))
        draw.line([top, bottom], fill=_LIMIT)
        beside = top[0] + 4 + draw.textlength(limit[1]) < _WIDTH
        draw.text((top[0] + (4 if beside else -4), top[1] + 4), limit[1], fill=_LIMIT, anchor="lt" if beside else "rt")
    line = [pixel(*point) for point in points]
    if len(line) > 1:
        draw.line(line, fill=_COLOR, width=2)
    for (x, y), name in zip(line, names, strict=False):
        fits = x + 8 + draw.textlength(name) < _WIDTH
        place, anchor = ((x + 8, y - 4), "lb") if fits else ((x - 4, y - 10), "rb")
        draw.rectangle(draw.textbbox(place, name, anchor=anchor), fill="white")
        draw.text(place, name, fill="black", anchor=anchor)
    for number, (x, y) in enumerate(line):
        size, color = (5, _CHOSEN) if number == chosen else (3, _COLOR)
        draw.ellipse([x - size, y - size, x + size, y + size], fill=color)
    draw.text((_LEFT, 8), title, fill="black")
    draw.text((_WIDTH // 2, _HEIGHT - 18), x_label, fill="black", anchor="mt")
    draw.text((6, 16), y_label, fill=(90, 90, 90))
    return picture


def _ticks(low: float, high: float) -> list[float]:
    """At most eight multiples of 1, 2 or 5 times a power of ten, the outer ones at or beyond ``low`` and ``high``."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
