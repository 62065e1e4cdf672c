"""Misaligned images: known crops, shifts, rotations, scales and flips, also of keypoints and masks.

All faces of the renderer are aligned, so copying the source's coordinates is nearly always right. Images with different
warps test the features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

SCALE, TURN, SHIFT = (0.75, 1.3), 30.0, 0.15
"""Ranges: scale of the object, degrees of rotation, fractions of the image side."""


def random_warps(seeds: Sequence[int]) -> torch.Tensor:
    """(B, 2, 3) maps from a warped image's coordinates in [-1, 1] to the original's; each from its own seed."""
    rows = []
    for seed in seeds:
        scale, turn, right, down, flip = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
        size = SCALE[0] * (SCALE[1] / SCALE[0]) ** scale
        angle = math.radians(TURN * (2 * turn - 1))
        cos, sin = math.cos(angle) / size, math.sin(angle) / size
        mirror = -1.0 if flip < 0.5 else 1.0
        x, y = 2 * SHIFT * (2 * right - 1), 2 * SHIFT * (2 * down - 1)
        turned = [[mirror * cos, mirror * sin], [-sin, cos]]
        rows.append([[*row, -(row[0] * x + row[1] * y)] for row in turned])
    return torch.tensor(rows)


def warp_images(images: torch.Tensor, warps: torch.Tensor, nearest: bool = False) -> torch.Tensor:
    """(B, C, H, W) warped by the maps, with border padding."""
    grid = F.affine_grid(warps, list(images.shape), align_corners=False)
    mode = "nearest" if nearest else "bilinear"
    return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False)


def warp_points(points: torch.Tensor, warps: torch.Tensor) -> torch.Tensor:
    """(B, K, 2) points x, y in [0, 1] of the originals, in the warped images; NaN if they are outside."""
    centred = points * 2 - 1
    moved = torch.linalg.solve(warps[:, None, :, :2], (centred - warps[:, None, :, 2])[..., None])[..., 0]
    moved = (moved + 1) / 2
    inside = ((moved >= 0) & (moved <= 1)).all(-1, keepdim=True)
    return torch.where(inside, moved, torch.nan)


def mirrored(warps: torch.Tensor) -> torch.Tensor:
    """(B,) bool: which maps flip."""
    return torch.linalg.det(warps[:, :, :2]) < 0


def swap_sides(points: torch.Tensor, flipped: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """(B, K, 2) points with left and right swapped in flipped images."""
    other = {"left": "right", "right": "left"}
    partner = [names.index("_".join([other.get(n.split("_")[0], n.split("_")[0]), *n.split("_")[1:]])) for n in names]
    return torch.where(flipped[:, None, None], points[:, partner], points)
