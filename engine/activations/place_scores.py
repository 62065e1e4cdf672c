"""How good some places of labelled pictures are: by masks that a probe must predict, or by points that must match."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .correspondence import find_correspondence, pck
from .features import Features
from .greedy_search import ScoreOf
from .pictures import Pair, Pictures
from .segmentation import ProbeSettings, confusion, fit_probe_on, iou
from .splits import Fold

SOFTNESS = 0.02
"""Of the soft argmax between cells."""


def score_by_masks(
    features: Features, pictures: Pictures, folds: Sequence[Fold], classes: int, size: tuple[int, int]
) -> ScoreOf:
    """Mean IoU of probes that are fitted on some pictures of each fold and judged on others.

    Args:
        size: (H, W) of the masks.
    """
    masks = pictures.masks
    assert masks is not None
    # class scores of every pixel, their maximum, and the mask with its copies
    beside = size[0] * size[1] * (4 * classes + 4 * 8)

    def score(places: tuple[str, ...]) -> float:
        table = torch.zeros(classes, classes, dtype=torch.long)
        for fold in folds:
            settings = ProbeSettings(pixels=features.pixels(places, len(fold.fitted), ProbeSettings().pixels))
            known = (
                (maps, masks(rows).to(maps.device)) for rows, maps in features.batches(places, fold.fitted, beside)
            )
            probe = fit_probe_on(known, classes, settings)
            for rows, maps in features.batches(places, fold.judged, beside):
                table += confusion(probe.predict(maps, size).cpu(), masks(rows).cpu(), classes).sum(0)
        return iou(table)[0]

    return score


def score_by_points(features: Features, pairs: Sequence[Pair], alpha: float) -> ScoreOf:
    """PCK over all points of all pairs: the share that lands within ``alpha`` of the picture's longer side."""

    def score(places: tuple[str, ...]) -> float:
        predicted, true = [], []
        for pair in pairs:
            maps = torch.cat([m for _, m in features.batches(places, (pair.source, pair.target))])
            match = find_correspondence(maps[0], maps[1], pair.points.to(maps), temperature=SOFTNESS)
            height, width = maps.shape[-2:]
            longer = torch.tensor([width, height]) / max(height, width)
            predicted.append(match.points.cpu() * longer)
            true.append(pair.truth.cpu() * longer)
        return pck(predicted, true, [1.0] * len(pairs), alpha)[0]

    return score
