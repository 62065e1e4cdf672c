"""Training records: flip, crop and resize a picture, and note what was done as controls (Berrada et al. 2024, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from ..config import Config
from ..errors import refuse

TOLD = ("original", "crop")


@dataclass(frozen=True)
class ControlRecord:
    """One picture.

    Attributes:
        image: (C, H, W) float.
        semantics: what the network is told of the content: text states (T, C), or a class number ().
        height, width: the original's, where ``image`` was resized before; else the image's.
        controls: further named values, for specs with controls of their own.
    """

    image: torch.Tensor
    semantics: torch.Tensor
    height: int | None = None
    width: int | None = None
    controls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AugmentConfig(Config):
    """How pictures are changed.

    Attributes:
        size: side of the result in pixels.
        flip: probability of a horizontal flip.
        crop: range of the crop's side, as a share of the picture's short side; drawn uniformly.
        aspect: largest width over height of a crop, and 1 over the smallest; drawn uniformly in its logarithm.
        told: which size goes into height and width, the ``original``'s or the ``crop``'s.

    Raises:
        VitrineError: numbers outside their range.
    """

    size: int = 256
    flip: float = 0.5
    crop: tuple[float, float] = (0.5, 1.0)
    aspect: float = 1.0
    told: str = "original"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.flip <= 1 or self.aspect < 1:
            given = (self.size, self.flip, self.aspect)
            raise refuse("size, flip, aspect", given, "size >= 1, 0 <= flip <= 1, aspect >= 1", "see AugmentConfig")
        if not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise refuse("crop", self.crop, "0 < least <= most <= 1", "(1.0, 1.0) crops the whole short side")
        if self.told not in TOLD:
            raise refuse("told", self.told, TOLD, "original is the default")


def augment(
    record: ControlRecord, config: AugmentConfig, random: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Flip, then crop, then resize.

    Returns:
        (C, size, size), and flip, crop_top, crop_left (shares of the flipped picture's height and width), aspect (the
        crop's width over height), height, width (pixels), with the record's own controls.
    """
    high, wide = record.image.shape[-2:]
    draw = torch.rand(5, generator=random, dtype=torch.float64).tolist()
    flip = draw[0] < config.flip
    image = record.image.flip(-1) if flip else record.image
    side = (config.crop[0] + draw[1] * (config.crop[1] - config.crop[0])) * min(high, wide)
    root = math.exp((draw[2] - 0.5) * math.log(config.aspect))
    h, w = (max(1, min(most, round(v))) for v, most in ((side / root, high), (side * root, wide)))
    top, left = int(draw[3] * (high - h + 1)), int(draw[4] * (wide - w + 1))
    part = image[None, :, top : top + h, left : left + w]
    shape = (config.size, config.size)
    small = part if part.shape[-2:] == shape else functional.interpolate(part, shape, mode="bilinear", antialias=True)
    told = (record.height or high, record.width or wide) if config.told == "original" else (h, w)
    controls = {"flip": float(flip), "crop_top": top / high, "crop_left": left / wide, "aspect": w / h}
    return small[0], controls | {"height": float(told[0]), "width": float(told[1])} | dict(record.controls)
