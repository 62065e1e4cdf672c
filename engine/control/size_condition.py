"""Size, crop and flip conditioning in pixels, for every family with such inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import refuse
from .spec import ControlSpec

Size = tuple[int, int]


@dataclass(frozen=True)
class SizeCondition:
    """Size conditioning of an image: original size, crop, target size and flip.

    Attributes:
        original: (height, width) of the original before resizing and cropping; None: the size of the generated image.
        crop: (top, left) of the crop.
        target: target (height, width), whose ratio is the aspect; None: the size of the generated image.
        flip: mirrored. Only models with a flip control use it.
        extra: further controls of a checkpoint, by name.
    """

    original: Size | None = None
    crop: Size = (0, 0)
    target: Size | None = None
    flip: bool = False
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("original", "target"):
            size = getattr(self, name)
            if size is not None and (len(size) != 2 or min(size) < 1):
                raise refuse(name, size, "(height, width) of 1 or more", "None is the size of the picture")
        if len(self.crop) != 2 or min(self.crop) < 0:
            raise refuse("crop", self.crop, "(top, left) of 0 or more", "(0, 0) is no crop")
        if not all(math.isfinite(v) for v in self.extra.values()):
            raise refuse("extra", dict(self.extra), "finite numbers", "leave out what is not known")

    def time_ids(self, size: Size) -> list[float]:
        """SDXL's six numbers for an image of ``size`` (height, width)."""
        return [*(self.original or size), *self.crop, *(self.target or size)]

    def aspect(self, size: Size) -> float:
        """Height over width, as PixArt takes it."""
        height, width = self.target or size
        return height / width

    def controls(self, size: Size, spec: ControlSpec) -> dict[str, float]:
        """The values of a checkpoint's controls: the default ones that ``spec`` has, and ``extra``.

        Crops become fractions of the original; aspect is width / height.
        """
        height, width = self.original or size
        known = {
            "flip": float(self.flip),
            "crop_top": self.crop[0] / height,
            "crop_left": self.crop[1] / width,
            "aspect": 1 / self.aspect(size),
            "height": float(height),
            "width": float(width),
        }
        return {k: v for k, v in known.items() if k in spec.names} | dict(self.extra)

    def high_is_null(self, size: Size) -> bool:
        """True if only the original size differs from the condition of an uncontrolled image of ``size``."""
        return tuple(self.crop) == (0, 0) and tuple(self.target or size) == tuple(size)
