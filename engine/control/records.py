"""Training records: flip, crop and resize an image, with the parameters as controls (Berrada et al. 2024, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch.nn import functional

from ..errors import refuse
from ..settings.option import Option, Options

SIZE_SOURCES = ("original", "crop")
_KEY = "told"
"""Key of ``size_from`` in files."""


@dataclass(frozen=True)
class ControlRecord:
    """One training image.

    Attributes:
        image: (C, H, W) float.
        semantics: the semantic condition: text states (T, C), or a class index ().
        height, width: of the original, if ``image`` was resized before; else of the image.
        controls: further named values, for specs with additional controls.
    """

    image: torch.Tensor
    semantics: torch.Tensor
    height: int | None = None
    width: int | None = None
    controls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AugmentConfig(Options):
    """Image augmentation."""

    size: Annotated[int, Option("Side of the result in pixels.", ge=1)] = 256
    flip: Annotated[float, Option("Probability of a horizontal flip.", ge=0, le=1)] = 0.5
    crop: Annotated[
        tuple[float, float],
        Option(
            "Range of the crop's side, as a fraction of the image's short side; sampled uniformly.",
            gt=0,
            le=1,
            remedy="(1.0, 1.0) crops the whole short side",
        ),
    ] = (0.5, 1.0)
    aspect: Annotated[
        float,
        Option(
            "Largest width / height of a crop, and 1 over the smallest; sampled log-uniformly.",
            ge=1,
        ),
    ] = 1.0
    size_from: Annotated[
        str,
        Option(
            "Which height and width become controls: of the original or the crop.",
            choices=SIZE_SOURCES,
        ),
    ] = "original"

    def _check(self) -> None:
        """The crop's range is in order."""
        if self.crop[0] > self.crop[1]:
            raise refuse("crop", self.crop, "least <= most", "(1.0, 1.0) crops the whole short side")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, under the keys of saved states."""
        return {_KEY if name == "size_from" else name: value for name, value in super().to_dict().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AugmentConfig:
        """The inverse of :meth:`to_dict`."""
        return super().from_dict({"size_from" if name == _KEY else name: value for name, value in values.items()})


def augment(
    record: ControlRecord, config: AugmentConfig, random: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Flips, then crops, then resizes.

    Returns:
        (C, size, size), and flip, crop_top, crop_left (fractions of the flipped image's height and width), aspect (the
        crop's width over height), height, width (pixels), with the record's controls.
    """
    height, width = record.image.shape[-2:]
    uniform = torch.rand(5, generator=random, dtype=torch.float64).tolist()
    flip = uniform[0] < config.flip
    image = record.image.flip(-1) if flip else record.image
    side = (config.crop[0] + uniform[1] * (config.crop[1] - config.crop[0])) * min(height, width)
    root = math.exp((uniform[2] - 0.5) * math.log(config.aspect))
    h, w = (max(1, min(most, round(v))) for v, most in ((side / root, height), (side * root, width)))
    top, left = int(uniform[3] * (height - h + 1)), int(uniform[4] * (width - w + 1))
    crop = image[None, :, top : top + h, left : left + w]
    shape = (config.size, config.size)
    if crop.shape[-2:] != shape:
        crop = functional.interpolate(crop, shape, mode="bilinear", antialias=True)
    original = (record.height or height, record.width or width)
    size = original if config.size_from == "original" else (h, w)
    controls = {"flip": float(flip), "crop_top": top / height, "crop_left": left / width, "aspect": w / h}
    return crop[0], controls | {"height": float(size[0]), "width": float(size[1])} | dict(record.controls)
