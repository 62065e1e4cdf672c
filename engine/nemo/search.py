"""The search (NeMo, Algorithms 2 to 4), written as one coroutine for each prompt.

A search yields the looks it needs and is sent the similarities of blocked to unblocked signals. Whoever drives it may
run the looks of many prompts in one batch (``lockstep``); the search cannot tell, so the result is the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import SearchConfig
from .score import Neurons

Look = tuple[Neurons, list[int]]
"""Neurons to block, and positions among the kept seeds."""
Searching = Generator[list[Look], list[torch.Tensor], "Found"]
Asking = Generator[list[Look], list[torch.Tensor], None]
Starting = Generator[list[Look], list[torch.Tensor], tuple[dict[str, list[int]], float, float, int, int]]
Testing = Generator[list[Look], list[torch.Tensor], tuple[int, list[float]]]
Entry = tuple[str, int]


@dataclass
class Found:
    """What a search ends with.

    Attributes:
        initial: address -> candidates as listed, duplicates included (outliers ascending, then the strongest).
        neurons: address -> neurons kept, in the order tested.
        initial_score, score: largest similarity of blocked to unblocked signals, before and after refinement.
        threshold: what refinement compared with: tau_search, or the reached score when the candidates were exhausted.
        exhausted: no candidate set came down to tau_search.
        theta, k: of the initial set.
        tests: refinement decisions as (address or neuron, score or lower bound, dropped).
    """

    initial: dict[str, list[int]]
    neurons: dict[str, list[int]]
    initial_score: float
    score: float
    threshold: float
    exhausted: bool
    theta: float
    k: int
    evaluations: int
    tests: list[tuple[str, float, bool]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For reports and NEURONS files."""
        plain = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "tests"}
        return plain | {"closest_decision": min((abs(s - self.threshold) for _, s, _ in self.tests), default=None)}


def candidates(
    addresses: Sequence[str], z: Sequence[torch.Tensor], a: Sequence[torch.Tensor], theta: float, k: int
) -> dict[str, list[int]]:
    """Per site: indices with |z| > theta ascending, then the k largest a descending (Algorithm 2; the code's order).

    z, a: one (width,) tensor for each address. A neuron may stand in both parts.
    """
    found = {}
    for address, zs, values in zip(addresses, z, a, strict=True):
        strongest = values.topk(min(k, len(values))).indices.tolist() if k else []
        found[address] = torch.nonzero(zs > theta).flatten().tolist() + strongest
    return found


def search(
    addresses: Sequence[str], z: Sequence[torch.Tensor], a: Sequence[torch.Tensor], seeds: int, config: SearchConfig,
    early: bool = True,
) -> Searching:  # fmt: skip
    """Find the neurons of one prompt.

    Args:
        addresses: sites in network order.
        z, a: (width,) |z-score| and activation of each site.
        seeds: how many kept seeds there are.
        early: decide "keep" on one seed where one is enough; exact when similarities do not depend on companions.
    """
    early = early and config.mode != "parity"
    initial, score, theta, k, count = yield from _initial(addresses, z, a, seeds, config)
    exhausted = score > config.stop
    found = Found(initial, {}, score, score, score if exhausted else config.stop, exhausted, theta, k, count)
    test = _Tester(found, list(range(seeds)), {ad: list(dict.fromkeys(ns)) for ad, ns in initial.items()}, early)
    layers = [[(ad, n) for n in test.current[ad]] for ad in reversed(addresses) if test.current.get(ad)]
    yield from _refine(test, layers, config)
    singles = [(ad, n) for ad in reversed(addresses) if test.current.get(ad) for n in initial[ad]]
    yield from _refine_singles(test, singles, config)
    found.neurons, found.score = {ad: ns for ad, ns in test.current.items() if ns}, test.score
    return found


def _initial(addresses: Sequence[str], z: Any, a: Any, seeds: int, config: SearchConfig) -> Starting:
    """Algorithm 3: loosen theta and k until blocking the candidates changes the prediction enough."""
    everyone = list(range(seeds))
    at_once = 1 if config.mode == "parity" else min(4, max(1, config.rows // seeds))
    tried, score, step = 0, 1.0, 0
    lists: dict[str, list[int]] = {}
    while tried < config.evaluations:
        steps = range(tried, min(tried + at_once, config.evaluations))
        several = [candidates(addresses, z, a, config.theta - i * config.theta_step, config.k + i * config.k_step)
                   for i in steps]  # fmt: skip
        looks: list[Look] = [(one, everyone) for one in several if any(one.values())]
        scores = iter((yield looks) if looks else [])
        for step, lists in zip(steps, several, strict=True):
            score = float(next(scores).max()) if any(lists.values()) else 1.0
            tried += 1
            if score <= config.stop:
                return lists, score, config.theta - step * config.theta_step, config.k + step * config.k_step, tried
    return lists, score, config.theta - step * config.theta_step, config.k + step * config.k_step, tried


def _refine_singles(test: _Tester, entries: list[Entry], config: SearchConfig) -> Asking:
    """Neurons one by one, in list order; a neuron may stand there twice (outlier and among the strongest).

    Re-activating a first copy changes nothing, so the official loop drops it as soon as the running score is below the
    threshold, and the second copy's test is the real one. While nothing has been dropped yet, which happens only after
    exhaustion, the first copy stays for good, and with it the neuron.
    """
    fixed: set[Entry] = set()
    while entries and test.score >= test.found.threshold:
        entry, entries = entries[0], entries[1:]
        if entry in entries:
            fixed.add(entry)
        elif entry not in fixed:
            yield from _refine(test, [[entry]], config)
    last = [e for i, e in enumerate(entries) if e not in entries[i + 1 :] and e not in fixed]
    yield from _refine(test, [[e] for e in last], config)


@dataclass
class _Tester:
    """The running set, and how sets without some of its neurons are put to the test."""

    found: Found
    seeds: list[int]
    current: dict[str, list[int]]
    early: bool

    def __post_init__(self) -> None:
        self.score, self.lead = self.found.initial_score, self.seeds[0]

    def without(self, entries: Sequence[Entry]) -> dict[str, list[int]]:
        gone = set(entries)
        return {ad: [n for n in ns if (ad, n) not in gone] for ad, ns in self.current.items()}

    def first_failure(self, sets: list[dict[str, list[int]]]) -> Testing:
        """(number of sets passed before the first that reaches the threshold, their scores)."""
        lead: list[float] = []
        rest = self.seeds
        if self.early and len(self.seeds) > 1:
            looks = yield [(one, [self.lead]) for one in sets]
            lead = [float(v.max()) for v in looks]
            passed = next((i for i, s in enumerate(lead) if s >= self.found.threshold), len(sets))
            if passed < len(sets):
                self.found.tests.append(("kept on one seed", lead[passed], False))
            sets, rest = sets[:passed], [s for s in self.seeds if s != self.lead]
        if not sets:
            return 0, []
        looks = yield [(one, rest) for one in sets]
        scores: list[float] = []
        for i, values in enumerate(looks):
            score = max(float(values.max()), lead[i] if lead else 0.0)
            if score >= self.found.threshold:
                self.lead = rest[int(values.argmax())]  # the seed that objects is the one to ask first
                return i, scores
            scores.append(score)
        return len(sets), scores


def _refine(test: _Tester, groups: list[list[Entry]], config: SearchConfig) -> Asking:
    """Algorithm 4: re-activate each group in turn; drop it for good if the score stays below the threshold."""
    if config.mode == "fast":
        yield from _bisect(test, groups)
        return
    position, width = 0, 1 if config.mode == "parity" else 4
    limit = 1 if config.mode == "parity" else max(1, config.rows // len(test.seeds))
    while position < len(groups):
        chain = groups[position : position + min(width, limit)]
        # If all of the first i pass, the running set is what it was without them: testing ahead loses nothing.
        sets = [test.without([e for g in chain[: i + 1] for e in g]) for i in range(len(chain))]
        passed, scores = yield from test.first_failure(sets)
        for i in range(passed):
            test.found.tests.append((_name(chain[i]), scores[i], True))
        if passed:
            test.current, test.score = sets[passed - 1], scores[passed - 1]
        if passed < len(chain):
            test.found.tests.append((_name(chain[passed]), test.found.threshold, False))
        position += passed + (passed < len(chain))
        width = min(2 * width, limit) if passed == len(chain) else max(1, width // 2)


def _bisect(test: _Tester, groups: list[list[Entry]]) -> Asking:
    """Drop halves at once. Every set accepted was tested as it stands, so the end set is verified; it need not be the
    one that testing singly would end with, nor minimal."""
    if not groups:
        return
    smaller = test.without([e for g in groups for e in g])
    passed, scores = yield from test.first_failure([smaller])
    if passed:
        test.current, test.score = smaller, scores[0]
        test.found.tests.append((f"{len(groups)} groups", scores[0], True))
    elif len(groups) > 1:
        middle = len(groups) // 2
        yield from _bisect(test, groups[:middle])
        yield from _bisect(test, groups[middle:])
    else:
        test.found.tests.append((_name(groups[0]), test.found.threshold, False))


def _name(group: list[Entry]) -> str:
    address, index = group[0]
    return f"{address} #{index}" if len(group) == 1 else f"{address} ({len(group)})"
