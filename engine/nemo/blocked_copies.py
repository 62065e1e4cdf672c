"""Whether blocking ended the copies: judged by sampled pictures, each of them, and by nothing the search optimised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import refuse
from ..runtime.finite import require_finite
from ..settings.one_line import one_line

SIDE = 64
THIRD = 1 / 3
"""Gu et al. 2023 (arXiv 2310.02664): a copy is nearer than a third of the distance that is usual."""


def picture_distance(pictures: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(N,) root mean square over pixels and colours between (N, 3, H, W) and (1, 3, H, W), both in [0, 1], at 64 px."""
    if pictures.shape[1:] != reference.shape[1:]:
        shown = (tuple(pictures.shape), tuple(reference.shape))
        raise refuse("pictures", shown, "samples of the reference's size", "resize the reference")
    small = [F.interpolate(x.float(), (SIDE, SIDE), mode="area") for x in (pictures, reference)]
    return (small[0] - small[1]).square().mean((1, 2, 3)).sqrt()


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """95 % interval of a share seen ``hits`` times of ``count`` (Wilson 1927); of none (0, 1)."""
    z2 = 1.96**2
    middle = (hits + z2 / 2) / (count + z2)
    half = (hits * (count - hits) / max(count, 1) + z2 / 4) ** 0.5 * 1.96 / (count + z2)
    return round(max(middle - half, 0.0), 3), round(min(middle + half, 1.0), 3)


@one_line
@dataclass(frozen=True)
class Copies:
    """Distances of samples to the picture that must not come back, see :func:`picture_distance`.

    Attributes:
        untouched, blocked: (N,) of the same seeds, without and with the neurons blocked.
        ordinary: (M,) of samples of captions that have nothing to do with the picture.
    """

    untouched: torch.Tensor
    blocked: torch.Tensor
    ordinary: torch.Tensor

    def __post_init__(self) -> None:
        for part in (self.untouched, self.blocked, self.ordinary):
            require_finite(part, "distance of a sample")

    @property
    def level(self) -> float:
        """Below it a sample is a copy."""
        return THIRD * float(self.ordinary.median())

    @property
    def copied(self) -> tuple[int, int]:
        """How many single samples are copies, without and with the neurons blocked."""
        before, after = (int((d < self.level).sum()) for d in (self.untouched, self.blocked))
        return before, after

    @property
    def verdict(self) -> str:
        """``cured`` if no sample is a copy any more, ``reduced``, ``failed``, or ``nothing to cure``."""
        before, after = self.copied
        if not before:
            return "nothing to cure"
        return "cured" if not after else "reduced" if after < before else "failed"

    def sentence(self) -> str:
        """For people: how many samples are copies, without and with the neurons blocked."""
        (before, after), count = self.copied, len(self.blocked)
        said = f"Untouched, {before} of {len(self.untouched)} pictures are copies of the training picture; "
        return said + f"with the neurons off, {after or 'none'} of {count}."

    def text(self) -> str:
        """The verdict with its counts, in a sentence."""
        (before, after), count = self.copied, len(self.blocked)
        nearest = f"nearest {float(self.untouched.min()):.3f} before, {float(self.blocked.min()):.3f} after"
        limits = f"{nearest}; a copy below {self.level:.3f}"
        return f"{self.verdict}: {before} of {count} samples are copies before, {after} after ({limits})"
