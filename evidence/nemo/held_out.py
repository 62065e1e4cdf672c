"""Planted pictures that chose nothing, and search seeds: what one search's figures leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.consensus import consensus, jaccard
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.nemo.neurons import NeuronSet
from ...engine.nemo.noise_similarity import threshold
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, arms, claim
from .baselines import random_neurons
from .later_plants import later_plants, load_later
from .measures import auroc, auroc_interval, mean_interval
from .remedies import COPY, SEEDS
from .world import (
    CALIBRATION,
    DETECT,
    FULL,
    ORDINARY,
    PAPER,
    ROWS,
    SEARCH,
    SHAPE,
    Effort,
    World,
    captions,
    effort_of,
    setting,
    verbatim,
)

SEARCHES = (1, 2, 3)
"""Seeds of the search's noises on the later plants; the published one is 1."""
TRIPLES = ((11, 12, 13), (21, 22, 23))
"""Seeds of two consensus sets that share no search."""


@claim(
    "nemo.held_out", paper=PAPER,
    figure="eight planted pictures that chose no setting: share of single samples that still copy after blocking, over "
    "three search seeds",
    target="at most 5 % of samples, where half or more copy untouched, and none of the pictures by its median",
    minutes=12, quick_minutes=0.9,
)  # fmt: skip
def held_out(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Score, search and stop as they were chosen on the shipped plants; pictures planted later, by a LoRA."""
    effort = replace(effort_of(quick), plants=2 if quick else 8)
    portraits = load_later(model=model)
    world = setting(portraits, progress, effort)
    plants = later_plants(portraits.tokenizer, effort.plants)
    prompts = [p.captions[0] for p in plants]
    searches = SEARCHES[:1] if quick else SEARCHES
    by_seed = {f"blocked, search seed {s}": _sets(world, prompts, s) for s in searches}
    ways = {
        "untouched": [NeuronSet({})] * len(plants),
        **by_seed,
        "published stop, search seed 1": _sets(world, prompts, 1, None),
        "as many random neurons": [random_neurons(world.model.unet, each) for each in next(iter(by_seed.values()))],
    }
    if not quick:  # not the claim's: thought of once these pictures had failed
        ways |= {f"flagged by the score that detects, search seed {s}": _flagged(world, prompts, s) for s in searches}
    copied = {name: _copied(world, plants, sets, effort) for name, sets in ways.items()}
    blocked = torch.cat([copied[name].shares for name in by_seed])
    share, untouched = float(blocked.mean()), float(copied["untouched"].shares.mean())
    by_median = sum(copied[name].by_median for name in by_seed)
    interval = share_interval(round(share * blocked.numel() * effort.seeds), blocked.numel() * effort.seeds)
    likely = interval[0] if quick else share
    return ClaimResult(
        round(share, 3), interval, likely <= 0.05 and untouched >= 0.5 and (quick or by_median == 0),
        {
            "copies [share of samples, pictures by their median, by any sample, median RMS]": {
                name: each.row() for name, each in copied.items()
            },
            "95 % when pictures are drawn again": mean_interval(blocked),
            "neurons by picture and search": {n: [len(s) for s in ways[n]] for n in ways if "search seed" in n},
            "without the rare words, share that copies": _controls(world, plants, effort),
            **_detection(world, plants, effort),
        },
        arms=arms(
            {"ours": share} | {name: float(each.shares.mean()) for name, each in copied.items()},
            {"ours": "ours", "published stop, search seed 1": "rival", "as many random neurons": "trivial",
             "untouched": "trivial"}, {"ours": interval},
        ), n=len(plants), seeds=len(searches),
    )  # fmt: skip


@claim(
    "nemo.seeds", paper=f"{PAPER}: its search looks at the noises of one seed",
    figure="Jaccard of the neurons of two consensus sets, of three searches each that share no seed",
    target="above the mean Jaccard of two single searches, by a 95 % interval over pictures",
    minutes=6, quick_minutes=1,
)  # fmt: skip
def seeds(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Searches from other noises, their consensus, and what blocking either leaves of the shipped planted pictures."""
    effort = effort_of(quick)
    world, plants = setting(model, progress, effort), verbatim(effort)
    prompts = [p.captions[0] for p in plants]
    single = {s: _sets(world, prompts, s) for triple in TRIPLES for s in triple}
    agreed = [
        [consensus([single[s][i] for s in triple], 0.5) for i in range(len(plants))] for triple in TRIPLES
    ]  # of two of three searches
    first, second = ([single[s] for s in triple] for triple in TRIPLES)
    across = [[jaccard(a[i], b[i]) for a in first for b in second] for i in range(len(plants))]  # as consensus sets are
    agreement = Agreement(across, [jaccard(a, b) for a, b in zip(*agreed, strict=True)])
    together, interval = agreement.together, mean_interval(agreement.gain)
    left = {f"one search, seed {s}": _copied(world, plants, sets, effort) for s, sets in single.items()}
    left |= {f"consensus of {t}": _copied(world, plants, s, effort) for t, s in zip(TRIPLES, agreed, strict=True)}
    return ClaimResult(
        round(float(together.mean()), 3), mean_interval(together), (interval[1] if quick else interval[0]) > 0,
        {
            **agreement.table([p.name for p in plants]),
            "copies after blocking [share of samples, pictures by their median, by any sample, median RMS]": {
                name: each.row() for name, each in left.items()
            },
            "neurons, mean over pictures": {
                "one search": round(_size([s for sets in single.values() for s in sets]), 1),
                "consensus": round(_size([s for sets in agreed for s in sets]), 1),
            },
        },
        arms=arms(
            {"ours": float(together.mean()), "two single searches": float(agreement.alone.mean())},
            {"ours": "ours", "two single searches": "rival"},
            {"ours": mean_interval(together), "two single searches": mean_interval(agreement.alone)},
        ), n=len(together), seeds=len(single),
    )  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """Jaccards of single searches, some for each picture, and of its two consensus sets; None is of two empty sets.

    Two searches that block nothing agree on no neuron, so such pairs are left out.
    """

    across: list[list[float | None]]
    consensus: list[float | None]

    @property
    def alone(self) -> torch.Tensor:
        """Mean of each picture's pairs of single searches; of pictures that have any."""
        means = [mean for mean in map(_mean_known, self.across) if mean is not None]
        return torch.tensor(means or [0.0])

    @property
    def together(self) -> torch.Tensor:
        """Of the consensus sets of each picture that has one."""
        return torch.tensor(_known(self.consensus) or [0.0])

    @property
    def gain(self) -> torch.Tensor:
        """Consensus less single, of pictures that have both."""
        pairs = zip(self.consensus, map(_mean_known, self.across), strict=True)
        return torch.tensor([a - b for a, b in pairs if a is not None and b is not None] or [0.0])

    def table(self, names: Sequence[str]) -> dict[str, Any]:
        """For the report."""
        known = [value for row in self.across for value in _known(row)]
        left_out = [row.count(None) for row in self.across]
        rows = zip(names, map(_mean_known, self.across), self.consensus, strict=True)
        return {
            "two single searches": {
                "mean": round(float(self.alone.mean()), 3), "95 %": mean_interval(self.alone),
                "least, largest": [round(extreme(known, default=0.0), 3) for extreme in (min, max)],
            },
            "gain by the consensus, 95 %": [round(float(self.gain.mean()), 3), mean_interval(self.gain)],
            "by picture [single, consensus]": {
                name: [None if v is None else round(v, 3) for v in values] for name, *values in rows
            },
            "pairs of two empty sets, left out [single, of; consensus, of]": [
                sum(left_out), sum(map(len, self.across)), self.consensus.count(None), len(self.consensus),
            ],
            "... of single searches, by picture": {n: c for n, c in zip(names, left_out, strict=True) if c},
        }  # fmt: skip


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Copied:
    """(P, seeds) pixel RMS between samples and their planted picture."""

    away: torch.Tensor

    @property
    def shares(self) -> torch.Tensor:
        """(P,) share of samples that copy."""
        return (self.away < COPY).float().mean(1)

    @property
    def by_median(self) -> int:
        """How many pictures are copied by the median of their samples."""
        return int((self.away.median(1).values < COPY).sum())

    def row(self) -> list[float]:
        """For tables."""
        some = int((self.shares > 0).sum())
        return [round(float(self.shares.mean()), 3), self.by_median, some, round(float(self.away.median()), 3)]


def _sets(world: World, prompts: Sequence[str], seed: int, share: float | None = 0.98) -> list[NeuronSet]:
    """Neurons of each prompt by a search from one seed's noises."""
    looking = replace(world, probe=replace(SEARCH, seed=seed))
    return [looking.neurons(r) for r in looking.find(prompts, share=share)]


def _flagged(world: World, prompts: Sequence[str], seed: int) -> list[NeuronSet]:
    """Neurons of each prompt that the score at its own timestep flags, whatever the one at the search's says.

    The published code has one score for both, and searches the seeds that it keeps; ours detects at another timestep
    than it searches. Its threshold is that of the same ordinary captions, at its own settings.
    """
    probe = make_probe(world.denoiser, config=replace(DETECT, seed=seed), rows=ROWS)
    ordinary = world.conditions(captions(CALIBRATION, FULL.calibration))
    tau = threshold([s.value for s in score_prompts(probe, ordinary, SHAPE, 1.0)[0]])[0]
    flags = score_prompts(probe, world.conditions(prompts), SHAPE, tau)[0]
    looking = replace(world, probe=replace(SEARCH, seed=seed))
    return [looking.neurons(r) for r in looking.find(prompts, flagged=flags)]


def _copied(world: World, plants: Sequence[Any], sets: Sequence[NeuronSet], effort: Effort) -> Copied:
    rows, chosen = [], SEEDS[: effort.seeds]
    for plant, neurons in zip(plants, sets, strict=True):
        images = world.sample([plant.captions[0]] * len(chosen), chosen, neurons)
        rows.append((images - world.model.draw(plant.scenes)).square().mean((1, 2, 3)).sqrt())
    return Copied(torch.stack(rows))


def _controls(world: World, plants: Sequence[Any], effort: Effort) -> float:
    """Of samples of the captions without their rare words."""
    plain = [replace(p, captions=p.controls) for p in plants]
    return round(float(_copied(world, plain, [NeuronSet({})] * len(plants), effort).shares.mean()), 3)


def _detection(world: World, plants: Sequence[Any], effort: Effort) -> dict[str, Any]:
    """Scores of the planted captions against those of ordinary ones, at the timestep chosen on other plants."""
    probe = make_probe(world.denoiser, config=DETECT, rows=ROWS)

    def values(texts: list[str]) -> torch.Tensor:
        return torch.tensor([s.value for s in score_prompts(probe, world.conditions(texts), SHAPE, 1.0)[0]])

    planted, ordinary = values([p.captions[0] for p in plants]), values(captions(ORDINARY, effort.ordinary))
    hits = int((planted > ordinary.quantile(0.99)).sum())
    return {
        "detection: AUROC, 95 %": [round(auroc(planted, ordinary), 4), auroc_interval(planted, ordinary)],
        "above the 99 % level of ordinary captions": f"{hits} of {len(planted)}",
        "... share, 95 %": share_interval(hits, len(planted)),
    }


def _size(sets: Sequence[NeuronSet]) -> float:
    return sum(map(len, sets)) / len(sets)
