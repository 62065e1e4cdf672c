"""Splits of labelled images: for fitting probes, for choosing sites, and held out for scoring the choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..errors import refuse
from .ranked_pictures import Pair

SPLITS = ("halves", "stratified", "crossed")


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
        "show it in another picture, or mark it 255 (unknown)" if single
        else "split='stratified' balances the classes" if split == "halves" else "take fewer folds, or more pictures"
    )  # fmt: skip
    raise refuse("masks", f"classes {single or sorted(missing)} missing from a part", "each class in each part", remedy)
