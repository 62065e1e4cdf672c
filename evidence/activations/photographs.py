"""Real photographs that scikit-image ships inside its wheel, their corners, and copies warped by known maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..photograph_folder import whole_photographs
from .warping import random_warps, warp_images, warp_points

NAMES = ("astronaut", "chelsea", "coffee", "rocket", "motorcycle")
CORNERS = 24
"""Points per photograph."""
_MARGIN = 0.1
"""Fraction of the side at each edge without points."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of photographs and their warped copies.

    Attributes:
        sources, targets: (P, 3, S, S) in [0, 1].
        points: of each pair, (N, 2) x, y in [0, 1] of the source; truth: their positions in the target.
        names: photograph of each pair.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    points: list[torch.Tensor]
    truth: list[torch.Tensor]
    names: list[str]


def load_photographs(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(5, 3, side, side) central squares in [0, 1] in the order of :data:`NAMES`, and (5, N, 2) Harris corners."""
    squares = whole_photographs()
    pictures = F.interpolate(squares, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
    peaks = [corners(square.mean(0), side) for square in squares]
    fewest = min(map(len, peaks))
    return pictures, torch.stack([c[:fewest] for c in peaks])


def corners(grey: torch.Tensor, side: int, border: float = _MARGIN) -> torch.Tensor:
    """(N, 2) Harris corners x, y in [0, 1] of a square grey picture, of details that it still has at ``side``."""
    from skimage.feature import corner_harris, corner_peaks

    size = grey.shape[-1]
    response = corner_harris(grey.numpy(), sigma=size / side)
    edge = round(border * size)
    peaks = corner_peaks(response, min_distance=size // 24, num_peaks=CORNERS, exclude_border=edge, threshold_rel=0)
    return (torch.from_numpy(peaks.copy()).flip(1).float() + 0.5) / size


def warped_pairs(side: int, warps: int, first: int) -> Pairs:
    """Every photograph with ``warps`` copies: rotated, scaled, shifted, half of them mirrored.

    Args:
        first: seed of the first warp; the others follow.
    """
    photographs, corners = load_photographs(side)
    count = len(photographs)
    maps = random_warps(range(first, first + count * warps))
    sources, known = photographs.repeat_interleave(warps, 0), corners.repeat_interleave(warps, 0)
    moved = warp_points(known, maps)
    seen = ~moved.isnan().any(2)
    return Pairs(
        sources, warp_images(sources, maps).clamp(0, 1), [p[s] for p, s in zip(known, seen, strict=True)],
        [m[s] for m, s in zip(moved, seen, strict=True)], [name for name in NAMES for _ in range(warps)],
    )  # fmt: skip


def raw_patches(pictures: torch.Tensor, cells: int = 16, width: int = 12) -> torch.Tensor:
    """(B, 3 w^2, cells, cells): the pixel patch around each cell, centred and normalised."""
    step = pictures.shape[-1] // cells
    around = F.pad(pictures, [(width - step) // 2] * 4, mode="reflect")
    patches = F.unfold(around, width, stride=step).unflatten(2, (cells, cells))
    return F.normalize(patches - patches.mean(1, keepdim=True), dim=1)


def daisy_maps(pictures: torch.Tensor, cells: int = 16, radius: int = 9) -> torch.Tensor:
    """(B, C, cells, cells): DAISY (Tola et al. 2010), a dense descriptor of oriented gradients as SIFT's."""
    from skimage.feature import daisy

    side = pictures.shape[-1]
    grey = F.pad(pictures.mean(1, keepdim=True), [radius] * 4, mode="reflect")[:, 0]
    maps = [torch.from_numpy(daisy(g.numpy(), step=1, radius=radius, rings=2)).float().movedim(-1, 0) for g in grey]
    whole = F.interpolate(torch.stack(maps), (side, side), mode="bilinear")
    return F.normalize(F.avg_pool2d(whole, side // cells), dim=1)
