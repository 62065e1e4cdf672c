"""Words on the pictures that a node shows on itself. What its outputs hand on is left as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

LINE = 16
"""Pixels of a line of words."""


def enlarged(pictures: torch.Tensor, least: int = 256) -> torch.Tensor:
    """(B, n H, n W, 3): small pictures n times as large, each pixel a square, so that they are ``least`` wide."""
    times = -(-least // pictures.shape[2])
    return pictures.repeat_interleave(times, 1).repeat_interleave(times, 2) if times > 1 else pictures


def captioned(
    pictures: torch.Tensor, names: Sequence[str] = (), colours: Mapping[str, str] | None = None, line: int = LINE
) -> torch.Tensor:
    """Enlarged pictures with a line above that says what each is, and one below that says what its colours mean.

    Args:
        pictures: (B, H, W, 3) in [0, 1].
        names: one for each picture; none: no line above. What is too long for the picture loses its middle.
        colours: colour, as HTML knows it -> what it means.
        line: pixels of a line of words.

    Raises:
        ValueError: There is not one name for each picture.
    """
    pictures = enlarged(pictures)
    parts = [pictures]
    if names:
        lines = [_line(pictures, name, {}, line) for _, name in zip(pictures, names, strict=True)]
        parts.insert(0, torch.stack(lines))
    if colours:
        parts.append(_line(pictures, "", colours, line).expand(len(pictures), -1, -1, -1))
    return torch.cat(parts, 1)


def banded(bands: Mapping[str, torch.Tensor], colours: Mapping[str, str]) -> torch.Tensor:
    """(1, H, W, 3): pictures (h, W, 3) below each other, each under its name; what the colours mean comes last."""
    *others, (name, last) = bands.items()
    parts = [captioned(picture[None], [above]) for above, picture in others]
    return torch.cat([*parts, captioned(last[None], [name], colours)], 1)


def _line(pictures: torch.Tensor, text: str, colours: Mapping[str, str], high: int) -> torch.Tensor:
    """(high, W, 3): words in white on black, and before each meaning a square of its colour."""
    width, scale = pictures.shape[2], high / LINE
    strip = Image.new("RGB", (width, high), "black")
    pen, x, font = ImageDraw.Draw(strip), 4.0, 10 * scale
    whole, kept = text, len(text) // 2
    while kept > 1 and pen.textlength(text, font_size=font) > width - 8:
        kept -= 1
        text = f"{whole[:kept]}...{whole[-kept:]}"
    pen.text((x, 2 * scale), text, "white", font_size=font)
    for colour, meaning in colours.items():
        pen.rectangle((x, 4 * scale, x + 7 * scale, 11 * scale), fill=colour, outline="gray")
        pen.text((x + 11 * scale, 2 * scale), meaning, "white", font_size=font)
        x += 19 * scale + pen.textlength(meaning, font_size=font)
    return torch.from_numpy(np.asarray(strip) / 255).to(pictures)
