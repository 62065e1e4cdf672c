"""Semantic correspondence: finds a point of one image in another, from activations alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import refuse
from .container import Activations


@dataclass(frozen=True)
class Matches:
    """Positions of N points of a source image in a target image.

    Attributes:
        points: (N, 2) x, y in [0, 1] of the target.
        similarity: (N,) cosine similarity of the two features.
        mutual: (N,) bool, the nearest neighbour of the target point in the source is in the source
            point's cell or an adjacent one.
    """

    points: torch.Tensor
    similarity: torch.Tensor
    mutual: torch.Tensor


def feature_maps(taps: Activations, size: tuple[int, int] | None = None) -> torch.Tensor:
    """(B, C, H, W): all spatial sites, normalised at every position, resized bilinearly and concatenated.

    Features are normalised first, so that no site dominates by its scale.
    """
    maps = [v.tensor.float() for v in taps.values() if v.grid is not None and v.tensor.ndim == 4]
    if not maps:
        raise refuse("activations", list(taps), "at least one layer with a grid", "tap a spatial layer")
    size = size or max(((m.shape[-2], m.shape[-1]) for m in maps), key=lambda s: s[0] * s[1])
    resized = [F.interpolate(F.normalize(m, dim=1), size=size, mode="bilinear", align_corners=False) for m in maps]
    return F.normalize(torch.cat(resized, 1), dim=1)


def sample_points(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """(N, C) features of (C, H, W) at (N, 2) points x, y in [0, 1], bilinear between cell centres, clamped at edges."""
    grid = (points.to(features) * 2 - 1).view(1, 1, -1, 2)
    sampled = F.grid_sample(features[None], grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled[0, :, 0].T


def similarity(features: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """(..., H, W) in [-1, 1]: at each cell of (..., C, H, W), the cosine to the nearest of (N, C) queries."""
    cells = F.normalize(features.flatten(-2), dim=-2)
    return (F.normalize(queries, dim=1) @ cells).amax(-2).unflatten(-1, features.shape[-2:])


def find_correspondence(
    source: torch.Tensor, target: torch.Tensor, points: torch.Tensor, *, temperature: float = 0.0, window: int = 2
) -> Matches:
    """Cosine nearest neighbour of each source point among the target's cells.

    Args:
        source, target: (C, H, W) feature maps of one image each, e.g. from :func:`feature_maps`.
        points: (N, 2) x, y in [0, 1].
        temperature: 0 takes the best cell's centre; above 0, a soft argmax over cells within ``window`` of it.
        window: in cells.
    """
    _check(source, target, points)
    # Cosine similarity of every point with every cell.
    queries = F.normalize(sample_points(source, points), dim=1)
    cells = F.normalize(target.flatten(1), dim=0)
    cosines = queries @ cells
    similarity, best = cosines.max(1)
    height, width = target.shape[-2:]
    matched = _centres(best, height, width)
    if temperature > 0:
        matched = _soft(cosines, best, height, width, temperature, window)
    return Matches(matched, similarity, _mutual(source, target, points, matched))


def _centres(index: torch.Tensor, height: int, width: int) -> torch.Tensor:
    y, x = index // width, index % width
    return torch.stack([(x + 0.5) / width, (y + 0.5) / height], 1)


def _soft(
    cosines: torch.Tensor, best: torch.Tensor, height: int, width: int, temperature: float, window: int
) -> torch.Tensor:
    """Softmax-weighted centre of the cells near the best one."""
    cells = torch.arange(height * width, device=cosines.device)
    away_x = (cells % width)[None] - (best % width)[:, None]
    away_y = (cells // width)[None] - (best // width)[:, None]
    near = (away_x.abs() <= window) & (away_y.abs() <= window)
    weights = torch.softmax((cosines / temperature).masked_fill(~near, float("-inf")), 1)
    return weights @ _centres(cells, height, width).to(weights)


def _mutual(source: torch.Tensor, target: torch.Tensor, points: torch.Tensor, matched: torch.Tensor) -> torch.Tensor:
    back = F.normalize(sample_points(target, matched), dim=1) @ F.normalize(source.flatten(1), dim=0)
    height, width = source.shape[-2:]
    landed = _centres(back.argmax(1), height, width)
    cells = torch.tensor([width, height], device=points.device)
    return ((landed - points.to(landed)) * cells).abs().amax(1) <= 1.5


def _check(source: torch.Tensor, target: torch.Tensor, points: torch.Tensor) -> None:
    if points.ndim != 2 or points.shape[-1] != 2 or not len(points):
        raise refuse("points", tuple(points.shape), "(N, 2) with N >= 1", "give at least one point as x, y in [0, 1]")
    if not bool(((points >= 0) & (points <= 1)).all()):
        raise refuse("points", points.tolist(), "x, y in [0, 1]", "divide pixels by the picture's width and height")
    if source.ndim != 3 or target.ndim != 3 or source.shape[0] != target.shape[0]:
        shapes = (tuple(source.shape), tuple(target.shape))
        raise refuse("features", shapes, "(C, H, W) and (C, H, W)", "tap the same layers of both pictures")


def flip_ensemble(plain: torch.Tensor, flipped: torch.Tensor) -> torch.Tensor:
    """Mean of (B, C, H, W) features of images and of their mirror images, flipped back.

    The result is symmetric: it helps for single parts, and confuses pairs such as left and right eyes.
    """
    return F.normalize(plain + flipped.flip(-1), dim=1)


def pck(
    predicted: Sequence[torch.Tensor],
    true: Sequence[torch.Tensor],
    scale: Sequence[float | torch.Tensor],
    alpha: float = 0.1,
) -> tuple[float, torch.Tensor]:
    """(PCK over all points, (P,) PCK of each pair): fraction of points within ``alpha`` * scale of the truth.

    Args:
        predicted, true: for each of P pairs (N_i, 2) in one unit; rows with NaN in ``true`` are left out.
        scale: for each pair, the longer side of the image ("img") or of the object's box ("bbox"), same unit.
    """
    lengths = (len(predicted), len(true), len(scale))
    if len(set(lengths)) != 1 or not len(predicted):
        raise refuse("pairs", lengths, "three lists of one length", "one entry per pair")
    hits = []
    for ours, truth, side in zip(predicted, true, scale, strict=True):
        visible = ~torch.isnan(truth).any(1)
        hits.append(((ours - truth).norm(dim=1)[visible] <= alpha * float(side)).float())
    by_pair = torch.stack([h.mean() if len(h) else torch.tensor(float("nan")) for h in hits])
    return float(torch.cat(hits).mean()), by_pair
