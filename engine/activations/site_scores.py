"""Scores of sites on labelled images: by masks that a probe predicts, or by keypoints that must match.

Sites are chosen on one part of the images, and the reported score is measured on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .correspondence import find_correspondence, pck
from .features import Features
from .greedy_search import ScoreOf, SearchResult
from .ranked_pictures import Pair, Pictures
from .segmentation import ProbeSettings, confusion, fit_probe_on, iou
from .splits import Fold, choosing_and_held_out, choosing_and_held_out_pairs, folds_of, nested

SOFTNESS = 0.02
"""Temperature of the soft argmax between cells."""


Search = Callable[[ScoreOf, str], SearchResult]
"""A search by a score function; the text is the name of the file with its scores."""
Judge = Callable[[Features, Search], tuple[SearchResult, float | None]]
"""Searches, and scores the choice on held-out images: None if there are too few."""


def judge_by_masks(pictures: Pictures, split: str, folds: int) -> Judge:
    """Scores by probes: half of the split's validation images choose, half are held out.

    If crossed, all images choose, and the score is nested cross-validation: of choices made without each part.
    """
    present, size = pictures.classes()
    whole, classes = folds_of(present, split, folds), max(max(p, default=0) for p in present) + 1
    name = f"scores-{split}" if split != "crossed" else f"scores-crossed-{folds}"

    def scored(features: Features, parts: Sequence[Fold]) -> ScoreOf:
        table = confusion_of(features, pictures, parts, classes, size)
        return lambda sites: iou(table(sites))[0]

    def judge(features: Features, search: Search) -> tuple[SearchResult, float | None]:
        if split == "crossed":
            result, table = search(scored(features, whole), f"{name}.json"), torch.zeros(classes, classes)
            for number, (inner, held_out) in enumerate(nested(whole, present)):
                chosen = search(scored(features, inner), f"{name}-without-{number}.json").chosen
                table += confusion_of(features, pictures, [held_out], classes, size)(chosen)
            return result, iou(table)[0]
        parts = [choosing_and_held_out(fold, present) for fold in whole]
        result = search(scored(features, [choosing for choosing, _ in parts]), f"{name}-held-out.json")
        unseen = [fold for _, fold in parts if fold.judged]
        return result, scored(features, unseen)(result.chosen) if unseen else None

    return judge


def judge_by_points(pairs: Sequence[Pair], alpha: float) -> Judge:
    """Scores by matches: half of the pairs choose, half are held out."""
    choosing, held_out = choosing_and_held_out_pairs(pairs)

    def judge(features: Features, search: Search) -> tuple[SearchResult, float | None]:
        result = search(score_by_points(features, choosing, alpha), f"scores-points-{alpha:g}-held-out.json")
        return result, score_by_points(features, held_out, alpha)(result.chosen) if held_out else None

    return judge


def confusion_of(
    features: Features, pictures: Pictures, folds: Sequence[Fold], classes: int, size: tuple[int, int]
) -> Callable[[tuple[str, ...]], torch.Tensor]:
    """(K, K) confusion counts of probes, fitted and validated on each fold.

    Args:
        size: (H, W) of the masks.
    """
    masks = pictures.masks
    assert masks is not None
    # class scores of every pixel, their maximum, and copies of the mask
    extra = size[0] * size[1] * (4 * classes + 4 * 8)

    def table_of(sites: tuple[str, ...]) -> torch.Tensor:
        table = torch.zeros(classes, classes, dtype=torch.long)
        for fold in folds:
            settings = ProbeSettings(pixels=features.pixels(sites, len(fold.fitted), ProbeSettings().pixels))
            known = ((maps, masks(rows).to(maps.device)) for rows, maps in features.batches(sites, fold.fitted, extra))
            probe = fit_probe_on(known, classes, settings)
            for rows, maps in features.batches(sites, fold.judged, extra):
                table += confusion(probe.predict(maps, size).cpu(), masks(rows).cpu(), classes).sum(0)
        return table

    return table_of


def score_by_points(features: Features, pairs: Sequence[Pair], alpha: float) -> ScoreOf:
    """PCK over all points of all pairs: the fraction within ``alpha`` of the image's longer side."""

    def score(sites: tuple[str, ...]) -> float:
        predicted, true = [], []
        for pair in pairs:
            maps = torch.cat([m for _, m in features.batches(sites, (pair.source, pair.target))])
            match = find_correspondence(maps[0], maps[1], pair.points.to(maps), temperature=SOFTNESS)
            height, width = maps.shape[-2:]
            longer = torch.tensor([width, height]) / max(height, width)
            predicted.append(match.points.cpu() * longer)
            true.append(pair.truth.cpu() * longer)
        return pck(predicted, true, [1.0] * len(pairs), alpha)[0]

    return score
