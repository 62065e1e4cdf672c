"""Neurons that several searches agree on: a greedy search from other noises keeps other neurons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import refuse
from .neurons import NeuronSet


def jaccard(first: NeuronSet, second: NeuronSet) -> float | None:
    """|A and B| / |A or B| of two sets of neurons: 0 where one of them is empty, None where both are.

    Two searches that block nothing do not agree on any neuron; counted as 1, they would make a search look steady.
    """
    a, b = _members(first), _members(second)
    return len(a & b) / len(a | b) if a | b else None


def consensus(sets: Sequence[NeuronSet], share: float = 0.5) -> NeuronSet:
    """The neurons that at least ``share`` of the searches kept, with what each of them reported.

    Ours: no publication has one. A lower share keeps more neurons and blocks more surely; a higher one keeps those
    that no choice of noises can talk away. ``info["consensus"]`` is the mean :func:`jaccard` of all pairs of
    searches as "jaccard", None if none kept a neuron, and as "empty_pairs" how many pairs of two empty sets that
    leaves out.

    Args:
        sets: of one prompt and model, each searched from other seeds; three or more, or there is nothing to agree on.
    """
    if len(sets) < 2:
        raise refuse("sets", len(sets), "two at least, five are usual", "search with other seeds")
    if not 0 < share <= 1:
        raise refuse("share", share, "a number in (0, 1]", "0.5 keeps what half of the searches kept")
    union, votes = sets[0].merged(*sets[1:]), Counter(member for each in sets for member in _members(each))
    neurons: dict[str, list[int]] = {}
    for (address, number), count in votes.items():
        if count >= share * len(sets) - 1e-9:
            neurons.setdefault(address, []).append(number)
    pairs = [jaccard(a, b) for i, a in enumerate(sets) for b in sets[:i]]
    known = [pair for pair in pairs if pair is not None]
    info = {
        "share": share, "searches": len(sets), "jaccard": sum(known) / len(known) if known else None,
        "empty_pairs": len(pairs) - len(known), "merged": union.info["merged"],
    }  # fmt: skip
    prompt = {"prompt": sets[0].info["prompt"]} if "prompt" in sets[0].info else {}
    return NeuronSet({a: tuple(n) for a, n in neurons.items()}, union.fingerprint, prompt | {"consensus": info})


def _members(neurons: NeuronSet) -> set[tuple[str, int]]:
    return {(address, number) for address, numbers in neurons.neurons.items() for number in numbers}
