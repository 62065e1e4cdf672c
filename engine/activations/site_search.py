"""Comparison of sites on labelled images: splits, scores by masks or keypoints, and a greedy search under a budget.

GDF's quantitative comparison (section 4.3): every candidate is scored alone; then the site that improves the
combination most is added repeatedly. The images that score the choice are none of those that made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import refuse
from ..io.files import named
from ..jobs.run import Run
from ..runtime.progress import Progress, silent
from ..settings.ranking_options import SPLITS
from .correspondence import find_correspondence, pck
from .ranked_pictures import Pair, Pictures
from .segmentation import ProbeSettings, confusion, fit_probe_on, iou
from .streaming import Features

ScoreOf = Callable[[tuple[str, ...]], float]


class Budget(NamedTuple):
    """Width of each site, and the largest sum of widths."""

    channels: Mapping[str, int]
    total: int


@dataclass(frozen=True)
class SearchResult:
    """Scores of the candidates and the best combination.

    Attributes:
        singles: site name -> score alone, best first.
        chosen: the combination, in the order in which its sites were added.
        score: of the combination.
    """

    singles: dict[str, float]
    chosen: tuple[str, ...]
    score: float


class _Scores:
    """Scores already computed, in a file from which an interrupted search resumes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        state = run.load()
        with named(run.path or "", "comparison state", "a table of scores", "delete the file"):
            self.table = {} if state is None else {k: float(v) for k, v in state.facts["scores"].items()}

    def score(self, addresses: tuple[str, ...], score_of: ScoreOf) -> float:
        key = " ".join(sorted(addresses))
        if key not in self.table:
            self.table[key] = float(score_of(addresses))
            self._run.save({}, facts={"scores": self.table})
        return self.table[key]


def greedy_search(
    candidates: Sequence[str],
    score_of: ScoreOf,
    *,
    budget: Budget | None = None,
    most: int = 4,
    pool: int = 12,
    tie: float = 0.0,
    state: Run | None = None,
    progress: Progress = silent,
) -> SearchResult:
    """Ranks sites by their individual scores, then combines them greedily.

    Args:
        score_of: larger is better; called once per combination.
        budget: bound on the channels of the combination; None is no bound.
        most: most sites in the combination.
        pool: only the best ``pool`` singles are tried as additions.
        tie: additions within this score of the best count as equal; the one that is best alone is added.
        state: stores the scores, from which the same call resumes; its inputs are what they depend on.
    """
    widths, total = budget or Budget({}, 0)  # a site without a width costs nothing
    allowed = [c for c in candidates if widths.get(c, 0) <= total]
    if not allowed:
        raise refuse("candidates", list(candidates), "at least one layer within the budget", "raise the budget")
    if state is not None and not isinstance(state, Run):
        remedy = "a path alone does not say what the scores depend on"
        raise refuse("state", state, "Run(file, 'comparison', what the scores depend on)", remedy)
    memory = _Scores(state or Run(None, "comparison", {}))
    singles = {}
    for i, address in enumerate(allowed):
        singles[address] = memory.score((address,), score_of)
        progress(i + 1, len(allowed), None)
    ranked = dict(sorted(singles.items(), key=lambda item: -item[1]))
    chosen: tuple[str, ...] = (next(iter(ranked)),)
    best = ranked[chosen[0]]
    while len(chosen) < most:
        used = sum(widths.get(c, 0) for c in chosen)
        additions = [c for c in list(ranked)[:pool] if c not in chosen]
        additions = [c for c in additions if used + widths.get(c, 0) <= total]
        scores = {c: memory.score((*chosen, c), score_of) for c in additions}
        if not scores or max(scores.values()) <= best:
            break
        added = next(c for c in additions if scores[c] >= max(scores.values()) - tie)
        chosen, best = (*chosen, added), scores[added]
    return SearchResult(ranked, chosen, best)


class Fold(NamedTuple):
    """Indices of the images that fit a probe, and of those that validate it."""

    fitted: tuple[int, ...]
    judged: tuple[int, ...]


def folds_of(present: Sequence[AbstractSet[int]], split: str = "halves", folds: int = 4) -> list[Fold]:
    """The folds of a split; a probe is fitted and validated in each.

    Args:
        present: the classes of each image.
        split: "halves" fits on the first half of the images and validates on the second; "stratified" divides them so
            that both halves have each class equally often; "crossed" makes ``folds`` such parts, each validated by a
            probe that is fitted on the others.
    """
    if split not in SPLITS:
        raise refuse("split", split, SPLITS, "'stratified' balances the classes")
    count, classes = len(present), set[int]().union(*present)
    if len(classes) < 2:
        remedy = "mark both; in mask files grey value 1 is the second class, and 255 is unknown"
        raise refuse("masks", f"classes {sorted(classes)}", "two or more", remedy)
    if split == "halves":
        parts = [list(range(count // 2)), list(range(count // 2, count))]
    else:
        number = folds if split == "crossed" else 2
        if not 2 <= number <= count:
            raise refuse("folds", number, f"2 .. {count}, the number of pictures", "four are usual")
        parts = stratified(present, number)
    whole = [Fold(tuple(n for p in parts if p is not part for n in sorted(p)), tuple(part)) for part in parts]
    chosen = whole if split == "crossed" else whole[1:]
    _check(chosen, present, classes, split)
    return chosen


def choosing_and_held_out(fold: Fold, present: Sequence[AbstractSet[int]]) -> tuple[Fold, Fold]:
    """The fold that chooses sites, and a held-out fold; the same images fit both.

    The validation images are divided so that both parts have each class as often as possible. With a single validation
    image, nothing is held out.
    """
    if len(fold.judged) < 2:
        return fold, Fold(fold.fitted, ())
    choosing, held_out = stratified([present[n] for n in fold.judged], 2)
    first, second = (tuple(fold.judged[i] for i in part) for part in (choosing, held_out))
    return Fold(fold.fitted, first), Fold(fold.fitted, second)


def nested(folds: Sequence[Fold], present: Sequence[AbstractSet[int]]) -> list[tuple[list[Fold], Fold]]:
    """For each part of a crossed split: folds among the other parts, which choose without it, and the part held out.

    If there are two parts, the other one is halved.
    """
    whole = []
    for fold in folds:
        others = [other.judged for other in folds if other is not fold]
        if len(others) == 1:
            (remaining,) = others
            others = [tuple(remaining[i] for i in part) for part in stratified([present[n] for n in remaining], 2)]
        rest_of = {part: tuple(n for p in others if p is not part for n in p) for part in others}
        whole.append(([Fold(fitted, part) for part, fitted in rest_of.items() if fitted and part], fold))
    return whole


def choosing_and_held_out_pairs(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Pairs that choose sites, and held-out pairs; no image is in both.

    Pairs across the two sets are left out. If all pairs share one image, every other pair is held out, and that image
    is in both sets; of a single pair, nothing is held out.
    """
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    side_of: dict[int, int] = {}
    for pair in pairs:
        where = {side_of[n] for n in (pair.source, pair.target) if n in side_of}
        if len(where) == 2:
            continue
        side = where.pop() if where else int(len(sides[1]) < len(sides[0]))
        side_of |= {pair.source: side, pair.target: side}
        sides[side].append(pair)
    return sides if sides[1] else (list(pairs[::2]), list(pairs[1::2]))


def stratified(present: Sequence[AbstractSet[int]], parts: int) -> list[list[int]]:
    """Images divided so that each part has each class as often as possible, rarest class first.

    Iterative stratification (Sechidis et al. 2011, Algorithm 1), with ties broken by the image index.
    """
    total = Counter(c for classes in present for c in classes)
    quota = [{c: n / parts for c, n in total.items()} for _ in range(parts)]
    free, left = [len(present) / parts] * parts, set(range(len(present)))
    shared: list[list[int]] = [[] for _ in range(parts)]
    while left:
        waiting = Counter(c for n in left for c in present[n])
        rarest = min(waiting, key=lambda c: (waiting[c], c), default=None)
        for n in sorted(n for n in left if rarest is None or rarest in present[n]):
            part = max(range(parts), key=lambda p: (quota[p].get(rarest, 0.0) if rarest is not None else 0.0, free[p]))
            shared[part].append(n)
            free[part] -= 1
            for c in present[n]:
                quota[part][c] -= 1
            left.discard(n)
    return [sorted(numbers) for numbers in shared]


def _check(folds: Sequence[Fold], present: Sequence[AbstractSet[int]], classes: AbstractSet[int], split: str) -> None:
    def shown(numbers: Sequence[int]) -> set[int]:
        return set[int]().union(*(present[n] for n in numbers))

    judged = shown([n for fold in folds for n in fold.judged])
    missing = {c for c in classes if c not in judged or any(c not in shown(fold.fitted) for fold in folds)}
    if not missing:
        return
    single = [c for c in sorted(missing) if sum(c in p for p in present) < 2]
    remedy = (
        "show it in another picture, or mark it 255 (unknown)"
        if single
        else "split='stratified' balances the classes"
        if split == "halves"
        else "take fewer folds, or more pictures"
    )
    raise refuse("masks", f"classes {single or sorted(missing)} missing from a part", "each class in each part", remedy)


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
            result, table = search(scored(features, whole), f"{name}.safetensors"), torch.zeros(classes, classes)
            for number, (inner, held_out) in enumerate(nested(whole, present)):
                chosen = search(scored(features, inner), f"{name}-without-{number}.safetensors").chosen
                table += confusion_of(features, pictures, [held_out], classes, size)(chosen)
            return result, iou(table)[0]
        parts = [choosing_and_held_out(fold, present) for fold in whole]
        result = search(scored(features, [choosing for choosing, _ in parts]), f"{name}-held-out.safetensors")
        unseen = [fold for _, fold in parts if fold.judged]
        return result, scored(features, unseen)(result.chosen) if unseen else None

    return judge


def judge_by_points(pairs: Sequence[Pair], alpha: float) -> Judge:
    """Scores by matches: half of the pairs choose, half are held out."""
    choosing, held_out = choosing_and_held_out_pairs(pairs)

    def judge(features: Features, search: Search) -> tuple[SearchResult, float | None]:
        result = search(score_by_points(features, choosing, alpha), f"scores-points-{alpha:g}-held-out.safetensors")
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
