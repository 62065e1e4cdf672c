"""Which labelled pictures fit a probe, which choose places by it, and which are held out to score the choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..errors import refuse
from .ranked_pictures import Pair

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


def choosing_and_held_out(fold: Fold, present: Sequence[AbstractSet[int]]) -> tuple[Fold, Fold]:
    """The fold that chooses places, and one that no choice sees; the same pictures fit both.

    The pictures that judge are shared out so that both parts show each class as often as they can. Where one picture
    judges, nothing is held out.
    """
    if len(fold.judged) < 2:
        return fold, Fold(fold.fitted, ())
    choosing, held = stratified([present[n] for n in fold.judged], 2)
    first, second = (tuple(fold.judged[i] for i in part) for part in (choosing, held))
    return Fold(fold.fitted, first), Fold(fold.fitted, second)


def nested(folds: Sequence[Fold], present: Sequence[AbstractSet[int]]) -> list[tuple[list[Fold], Fold]]:
    """For each part of a crossed split: folds among the other parts, which choose without it, and the part held out.

    Of two parts, the other one is halved.
    """
    whole = []
    for fold in folds:
        others = [other.judged for other in folds if other is not fold]
        if len(others) == 1:
            (alone,) = others
            others = [tuple(alone[i] for i in part) for part in stratified([present[n] for n in alone], 2)]
        rest_of = {part: tuple(n for p in others if p is not part for n in p) for part in others}
        whole.append(([Fold(fitted, part) for part, fitted in rest_of.items() if fitted and part], fold))
    return whole


def choosing_and_held_out_pairs(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Pairs that choose places, and pairs that no choice sees; no picture is in both.

    A pair between the two is left out. Where all pairs hang together by one picture, every other one is held out, and
    that picture is in both; of one pair, nothing is held out.
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
