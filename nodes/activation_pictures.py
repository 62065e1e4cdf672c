"""Activations as pictures: three principal components of a layer as red, green and blue."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..engine.activations import Activations, PCABasis, pca_rgb
from ..engine.errors import refuse


def picture(taps: Activations, address: str = "", shared: bool = True, size: int = 256) -> torch.Tensor:
    """IMAGE (B, size, width, 3): three principal components of one layer as colours.

    ``shared`` fits one basis on the whole batch, so that equal colours mean equal features.
    """
    sites = [a for a in taps if taps[a].grid is not None]
    chosen = taps.select(address) if address else taps.select(sites[:1])
    activation = next((taps[a] for a in chosen if taps[a].grid is not None), None)
    if activation is None or activation.grid is None:
        accepted = sites or "none of these: text tokens and attention maps have no picture"
        raise refuse("address", address or list(taps)[:3], accepted, "tap a layer of the picture as well")
    return coloured(activation.tensor.float(), shared, size)


def coloured(maps: torch.Tensor, shared: bool, size: int) -> torch.Tensor:
    """IMAGE (B, size, width, 3) of features (B, C, h, w): three principal components as colours.

    Of videos (B, C, T, h, w), one picture for each frame, those of a video together.
    """
    maps = maps.movedim(2, 1).flatten(0, 1) if maps.ndim == 5 else maps
    height, width = maps.shape[-2:]
    target = (size, round(size * width / height))
    if shared:
        return pca_rgb(maps, PCABasis.fit(maps), target).permute(0, 2, 3, 1)
    return torch.cat([pca_rgb(row[None], None, target) for row in maps]).permute(0, 2, 3, 1)


def with_legend(pictures: torch.Tensor) -> torch.Tensor:
    """(B, H + 18, W, 3): a line below says what the colours mean, where there is room for it; for the page alone."""
    width = pictures.shape[2]
    if width < 200:
        return pictures
    strip = Image.new("RGB", (width, 18), "black")
    pen = ImageDraw.Draw(strip)
    for place, (colour, name) in enumerate({"red": "1st", "lime": "2nd", "blue": "3rd component"}.items()):
        pen.rectangle((4 + 36 * place, 5, 11 + 36 * place, 12), fill=colour)
        pen.text((14 + 36 * place, 3), name, "white", font_size=10)
    line = torch.from_numpy(np.asarray(strip) / 255).to(pictures)
    return torch.cat([pictures, line.expand(len(pictures), -1, -1, -1)], 1)


def first_picture(taps: Activations, size: int = 256) -> torch.Tensor:
    """IMAGE (1, size, width, 3) of the first row at the first site that has a grid, in its own colours."""
    activation = next((taps[a] for a in taps if taps[a].grid is not None), None)
    if activation is None or activation.grid is None:
        raise refuse("places", list(taps), "one with a grid", "text tokens and attention maps have no picture")
    return coloured(activation.tensor[:1].float(), True, size)[:1]
