"""Metrics on activations with ground truth, for this package's claims and pages."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...engine.activations.correspondence import find_correspondence, pck
from .tapped_pictures import SIDE, Pictures

ALPHA = 0.1
"""A match within this fraction of the image's side is correct."""

_NEIGHBOURS = 6


def part_agreement(maps: torch.Tensor, parts: torch.Tensor) -> float:
    """Fraction of foreground positions whose nearest feature (cosine) in other pictures has the same part label.

    Args:
        maps: (B, C, h, w) activations of B >= 2 images, resized to 16 x 16 so that all sites have the same task.
        parts: (B, H, W) part indices, 0 is the background.

    Returns:
        Mean over images, in [0, 1].
    """
    return part_agreement_by_picture(maps, parts).mean().item()


def part_agreement_by_picture(maps: torch.Tensor | None, parts: torch.Tensor) -> torch.Tensor:
    """(B,) as :func:`part_agreement`: each image is searched in the six following ones, cyclically.

    Args:
        maps: None copies the positions.
    """
    labels, count = _labels(parts), len(parts)
    if maps is not None:
        maps = F.interpolate(maps.float(), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        features = F.normalize(maps.flatten(2) - maps.mean((0, 2, 3))[:, None], dim=1)
    scores = []
    for i in range(count):
        foreground = labels[i] > 0
        others = [(i + step) % count for step in range(1, min(_NEIGHBOURS, count - 1) + 1)]
        if maps is None:
            nearest = [torch.arange(SIDE * SIDE)] * len(others)
        else:
            nearest = [(features[i].T @ features[j]).argmax(1) for j in others]
        hits = [labels[j][n][foreground] == labels[i][foreground] for j, n in zip(others, nearest, strict=True)]
        scores.append(torch.stack(hits).float().mean())
    return torch.stack(scores)


def _labels(parts: torch.Tensor) -> torch.Tensor:
    """(B, 256): the most frequent part of each cell."""
    one_hot = F.one_hot(parts.long()).movedim(-1, 1).float()
    return F.adaptive_avg_pool2d(one_hot, (SIDE, SIDE)).argmax(1).flatten(1)


def correspondence_score(
    pictures: Pictures, features: torch.Tensor | None, alpha: float = ALPHA
) -> tuple[float, torch.Tensor]:
    """PCK relative to the image's side, over all points and (B,) per image; image i is matched with image i + B / 2.

    Args:
        features: (B, C, h, w); None copies the source's coordinates.
    """
    count = len(pictures.images)
    predicted, true = [], []
    for i in range(count):
        j = (i + count // 2) % count
        visible = ~torch.isnan(pictures.keypoints[i]).any(1)
        points = moved = pictures.keypoints[i][visible]
        if features is not None and len(points):
            moved = find_correspondence(features[i], features[j], points, temperature=0.02).points
        predicted.append(moved)
        true.append(pictures.keypoints[j][visible])
    return pck(predicted, true, [1.0] * count, alpha)


def by_pair(scores: torch.Tensor) -> torch.Tensor:
    """(B / 2,) from (B,): images i to j and j to i are one pair, so that a bootstrap does not count it twice."""
    return scores.view(2, -1).nanmean(0)
