"""Which labelled pictures fit a probe, and which judge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..errors import refuse

SPLITS = ("halves", "stratified", "crossed")


class Fold(NamedTuple):
    """Numbers of the pictures that fit a probe, and of those that judge it."""

    fitted: tuple[int, ...]
    judged: tuple[int, ...]


def folds_of(present: Sequence[AbstractSet[int]], split: str = "halves", folds: int = 4) -> list[Fold]:
    """The folds of a split; a probe is fitted and judged in each.

    Args:
        present: the classes of each picture.
        split: "halves" fits the first half of the pictures and judges the second; "stratified" divides them so that
            both halves show each class equally often; "crossed" divides them into ``folds`` such parts, each judged
            by a probe that is fitted on the others.

    Raises:
        VitrineError: If there are fewer than two classes, fewer pictures than parts, or a class that would be judged
            without being fitted, or never judged.
    """
    if split not in SPLITS:
        raise refuse("split", split, SPLITS, "'stratified' shares the classes out")
    count, classes = len(present), set[int]().union(*present)
    if len(classes) < 2:
        raise refuse("masks", f"classes {sorted(classes)}", "two or more", "mix the pictures")
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


def stratified(present: Sequence[AbstractSet[int]], parts: int) -> list[list[int]]:
    """Pictures shared out so that each part shows each class as often as it can, rarest class first.

    Iterative stratification (Sechidis et al. 2011, Algorithm 1), with ties broken by the picture's number.
    """
    total = Counter(c for classes in present for c in classes)
    wanted = [{c: n / parts for c, n in total.items()} for _ in range(parts)]
    room, left = [len(present) / parts] * parts, set(range(len(present)))
    shared: list[list[int]] = [[] for _ in range(parts)]
    while left:
        waiting = Counter(c for n in left for c in present[n])
        rarest = min(waiting, key=lambda c: (waiting[c], c), default=None)
        for n in sorted(n for n in left if rarest is None or rarest in present[n]):
            part = max(range(parts), key=lambda p: (wanted[p].get(rarest, 0.0) if rarest is not None else 0.0, room[p]))
            shared[part].append(n)
            room[part] -= 1
            for c in present[n]:
                wanted[part][c] -= 1
            left.discard(n)
    return [sorted(numbers) for numbers in shared]


def _check(folds: Sequence[Fold], present: Sequence[AbstractSet[int]], classes: AbstractSet[int], split: str) -> None:
    def shown(numbers: Sequence[int]) -> set[int]:
        return set[int]().union(*(present[n] for n in numbers))

    judged = shown([n for fold in folds for n in fold.judged])
    missing = {c for c in classes if c not in judged or any(c not in shown(fold.fitted) for fold in folds)}
    if not missing:
        return
    alone = [c for c in sorted(missing) if sum(c in p for p in present) < 2]
    remedy = (
        "show it in another picture, or mark it 255 (unknown)" if alone
        else "split='stratified' shares classes out" if split == "halves" else "take fewer folds, or more pictures"
    )  # fmt: skip
    raise refuse("masks", f"classes {alone or sorted(missing)} missing from a part", "each class in each part", remedy)
