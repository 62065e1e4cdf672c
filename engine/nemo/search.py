"""The search (NeMo, Algorithms 2 to 4), written as one coroutine for each prompt.

A search yields the trials it needs as a :class:`Round`, in which it then finds the similarities of blocked to unblocked
signals. The caller that runs the rounds may run those of many prompts in one batch (``lockstep``); the search cannot
tell, so the result is the same.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..settings.nemo_options import SearchConfig
from .noise_similarity import Neurons

Lists = dict[str, list[int]]
"""Address -> neurons."""
Trial = tuple[Neurons, list[int]]
"""Neurons to block, and positions among the kept seeds."""
Entry = tuple[str, int]
"""Address and index of one neuron."""


@dataclass
class Round:
    """Trials that a search waits for.

    Attributes:
        decided: fraction of the candidates whose end is known, 0..1.
        similarities: of each trial, (number of its seeds,), set before the search resumes.
    """

    trials: list[Trial]
    decided: float = 0.0
    similarities: list[torch.Tensor] = field(default_factory=list)


Search = Generator[Round, None, "Outcome"]
Refining = Generator[Round, None, None]


@dataclass
class Outcome:
    """What a search ends with.

    Attributes:
        initial: address -> candidates as listed, duplicates included (outliers ascending, then the strongest).
        neurons: address -> neurons kept, in the order tested.
        initial_score, score: largest similarity of blocked to unblocked signals, before and after refinement.
        threshold: what refinement compared with: the stop, or the reached score when the candidates were exhausted.
        exhausted: no candidate set came down to the stop.
        theta, k: of the initial set.
        evaluations: how many pairs (theta, k) were tried.
        tests: refinement decisions as (address or neuron, score or lower bound, dropped).
    """

    initial: Lists
    neurons: Lists
    initial_score: float
    score: float
    threshold: float
    exhausted: bool
    theta: float
    k: int
    evaluations: int
    tests: list[tuple[str, float, bool]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files."""
        plain = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "tests"}
        # A set that was kept on one seed scored at least this, on all seeds no less.
        return plain | {"closest_decision": min((abs(s - self.threshold) for _, s, _ in self.tests), default=None)}


def candidates(
    addresses: Sequence[str], z: Sequence[torch.Tensor], a: Sequence[torch.Tensor], theta: float, k: int
) -> Lists:
    """Per site: outliers ascending, then the k strongest descending, in the order of the official code.

    z, a: one (width,) tensor of |z-scores| and of activations for each address. A neuron may be in both parts.
    """
    lists = {}
    for address, deviations, activations in zip(addresses, z, a, strict=True):
        # NeMo, Algorithm 2: {i : |z_i| > theta}, and the k neurons with the largest a_i
        strongest = activations.topk(min(k, len(activations))).indices.tolist() if k else []
        lists[address] = torch.nonzero(deviations > theta).flatten().tolist() + strongest
    return lists


def search(
    addresses: Sequence[str],
    z: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor],
    seeds: int,
    config: SearchConfig,
    stop: float,
    early: bool = True,
) -> Search:
    """Find the neurons of one prompt.

    Args:
        addresses: sites in network order.
        z, a: (width,) |z-score| and activation of each site.
        seeds: how many kept seeds there are.
        stop: similarity of blocked to unblocked signals at which blocking has changed enough.
        early: decide "keep" on one seed where one is enough; exact when similarities do not depend on companions.
    """
    early = early and config.mode != "parity"
    start = yield from _initial(addresses, z, a, seeds, config, stop)
    exhausted = start.score > stop
    limit = start.score if exhausted else stop
    initial = start.lists
    outcome = Outcome(initial, {}, start.score, start.score, limit, exhausted, start.theta, start.k, start.evaluations)
    tester = _Tester(outcome, list(range(seeds)), {ad: list(dict.fromkeys(ns)) for ad, ns in initial.items()}, early)
    # NeMo, Algorithm 4: whole layers first, then single neurons
    layers = [[(ad, n) for n in tester.blocked[ad]] for ad in reversed(addresses) if tester.blocked.get(ad)]
    yield from _refine(tester, layers, config)
    singles = [(ad, n) for ad in reversed(addresses) if tester.blocked.get(ad) for n in initial[ad]]
    yield from _refine_singles(tester, singles, config)
    outcome.neurons, outcome.score = {ad: ns for ad, ns in tester.blocked.items() if ns}, tester.score
    return outcome


class _Start(NamedTuple):
    """Where refinement starts: candidate lists, their score, the pair they belong to, and how many were tried."""

    lists: Lists
    score: float
    theta: float
    k: int
    evaluations: int


def _initial(
    addresses: Sequence[str],
    z: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor],
    seeds: int,
    config: SearchConfig,
    stop: float,
) -> Generator[Round, None, _Start]:
    """Loosen theta and k until blocking the candidates changes the prediction enough."""
    everyone = list(range(seeds))
    at_once = 1 if config.mode == "parity" else min(4, max(1, config.rows // seeds))
    start = _Start({}, 1.0, config.theta, config.k, 0)
    while start.evaluations < config.evaluations:
        # NeMo, Algorithm 3: theta <- theta - theta_step, k <- k + k_step
        steps = range(start.evaluations, min(start.evaluations + at_once, config.evaluations))
        pairs = [(config.theta - i * config.theta_step, config.k + i * config.k_step) for i in steps]
        sets = [candidates(addresses, z, a, theta, k) for theta, k in pairs]
        asked = Round([(lists, everyone) for lists in sets if any(lists.values())])
        if asked.trials:
            yield asked
        similarities = iter(asked.similarities)
        for (theta, k), lists in zip(pairs, sets, strict=True):
            score = float(next(similarities).max()) if any(lists.values()) else 1.0
            start = _Start(lists, score, theta, k, start.evaluations + 1)
            if score <= stop:
                return start
    return start


def _refine_singles(tester: _Tester, entries: list[Entry], config: SearchConfig) -> Refining:
    """Neurons one by one, in list order; a neuron may be listed twice (outlier and among the strongest).

    Re-activating a first copy changes nothing, so the official loop drops it as soon as the running score is below the
    threshold, and the second copy's test is the real one. While nothing has been dropped yet, which happens only after
    exhaustion, the first copy stays for good, and with it the neuron.
    """
    fixed: set[Entry] = set()
    while entries and tester.score >= tester.outcome.threshold:
        entry, entries = entries[0], entries[1:]
        if entry in entries:
            fixed.add(entry)
        elif entry not in fixed:
            yield from _refine(tester, [[entry]], config)
    last_copies = [e for i, e in enumerate(entries) if e not in entries[i + 1 :] and e not in fixed]
    yield from _refine(tester, [[e] for e in last_copies], config)


@dataclass
class _Tester:
    """The set blocked so far, and how sets without some of its neurons are put to the test."""

    outcome: Outcome
    seeds: list[int]
    blocked: Lists
    early: bool

    def __post_init__(self) -> None:
        self.score, self.lead = self.outcome.initial_score, self.seeds[0]
        self.candidates, self.kept = max(1, sum(map(len, self.blocked.values()))), 0

    @property
    def decided(self) -> float:
        """Fraction of the candidates that are dropped, or kept by a test of their own."""
        return min(1.0, 1 - (sum(map(len, self.blocked.values())) - self.kept) / self.candidates)

    def keep(self, group: Sequence[Entry], score: float) -> None:
        """Notes that a group stays blocked."""
        self.kept += len(group) == 1
        self.outcome.tests.append((_name(group), score, False))

    def without(self, entries: Sequence[Entry]) -> Lists:
        """The blocked neurons but these."""
        active = set(entries)
        return {ad: [n for n in ns if (ad, n) not in active] for ad, ns in self.blocked.items()}

    def first_failure(self, sets: Sequence[Mapping[str, list[int]]]) -> Generator[Round, None, tuple[int, list[float]]]:
        """(number of sets that pass before the first that reaches the threshold, their scores and then its own)."""
        lead_scores: list[float] = []
        seeds = self.seeds
        if self.early and len(self.seeds) > 1:
            yield (asked := Round([(blocked, [self.lead]) for blocked in sets], self.decided))
            lead_scores = [float(v.max()) for v in asked.similarities]
            passed = next((i for i, s in enumerate(lead_scores) if s >= self.outcome.threshold), len(sets))
            failing = lead_scores[passed : passed + 1]
            sets, seeds = sets[:passed], [s for s in self.seeds if s != self.lead]
        else:
            failing = []
        if not sets:
            return 0, failing
        yield (asked := Round([(blocked, seeds) for blocked in sets], self.decided))
        scores: list[float] = []
        for i, values in enumerate(asked.similarities):
            score = max(float(values.max()), lead_scores[i] if lead_scores else 0.0)
            if score >= self.outcome.threshold:
                self.lead = seeds[int(values.argmax())]  # the seed that objects is the one to ask first
                return i, [*scores, score]
            scores.append(score)
        return len(sets), scores + failing


def _refine(tester: _Tester, groups: list[list[Entry]], config: SearchConfig) -> Refining:
    """Re-activates each group in turn; a group is dropped for good if the score stays below the threshold."""
    if config.mode == "fast":
        yield from _bisect(tester, groups)
        return
    position, width = 0, 1 if config.mode == "parity" else 4
    limit = 1 if config.mode == "parity" else max(1, config.rows // len(tester.seeds))
    while position < len(groups):
        chain = groups[position : position + min(width, limit)]
        # If all of the first i pass, the blocked set is what it was without them: testing ahead loses nothing.
        sets = [tester.without([e for g in chain[: i + 1] for e in g]) for i in range(len(chain))]
        passed, scores = yield from tester.first_failure(sets)
        for i in range(passed):
            tester.outcome.tests.append((_name(chain[i]), scores[i], True))
        if passed:
            tester.blocked, tester.score = sets[passed - 1], scores[passed - 1]
        if passed < len(chain):
            tester.keep(chain[passed], scores[passed])
        position += passed + (passed < len(chain))
        width = min(2 * width, limit) if passed == len(chain) else max(1, width // 2)


def _bisect(tester: _Tester, groups: list[list[Entry]]) -> Refining:
    """Drops all groups at once, or else each half of them.

    Every set accepted was tested as a whole, so the end set is verified; it need not be the one that testing singly
    would end with, nor minimal.
    """
    if not groups:
        return
    smaller = tester.without([e for g in groups for e in g])
    passed, scores = yield from tester.first_failure([smaller])
    if passed:
        tester.blocked, tester.score = smaller, scores[0]
        tester.outcome.tests.append((f"{len(groups)} groups", scores[0], True))
    elif len(groups) > 1:
        middle = len(groups) // 2
        yield from _bisect(tester, groups[:middle])
        yield from _bisect(tester, groups[middle:])
    else:
        tester.keep(groups[0], scores[0])


def _name(group: Sequence[Entry]) -> str:
    address, index = group[0]
    return f"{address} #{index}" if len(group) == 1 else f"{address} ({len(group)})"
