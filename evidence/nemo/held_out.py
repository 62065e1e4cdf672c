"""Held-out memorized pictures, and search seeds: what one search's figures leave open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.consensus import consensus, jaccard
from ...engine.nemo.few_step_detection import Agreement as FewStepAgreement
from ...engine.nemo.neurons import NeuronSet
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..registry import Arm, ClaimResult, Table, arms, claim
from .later_plants import FILE, FURTHER
from .memorized_sets import BARE, BASE, Measured, Outcome, measure_plants
from .plant_files import PlantFile
from .probed_model import PAPER, ProbedModel, SampleBudget, budget_of, setting, verbatim
from .remedies import COPY, SEEDS
from .rivals import RIVALS

TRIPLES = ((11, 12, 13), (21, 22, 23))
"""Seeds of two consensus sets that share no search."""


@claim(
    "nemo.held_out", paper=PAPER,
    figure="held-out memorized pictures: fraction of single samples that still copy after blocking, over three search "
           "seeds",
    target="at most 5 % of samples, where half or more copy untouched; ordinary captions lose at most 2 points of "
           "prompt agreement; each verbatim copy is detected; false alarms can be 1 %",
    minutes=30, quick_minutes=0.8,
)  # fmt: skip
def held_out(
    model: str | None = None, progress: Progress = silent, quick: bool = False, plants: str | None = None
) -> ClaimResult:
    """Detection, search and stop as they were chosen on the shipped plants, on pictures memorized later, by LoRAs.

    ``plants`` is another list of memorized pictures, see :mod:`vitrine.evidence.nemo.plant_files`; by default all that
    ship are measured, and of a quick run two of the first.
    """
    files = [Path(plants)] if plants else [FILE] if quick else [FILE, *FURTHER]
    size = Measured((1,), 2, 20, 12, budget=budget_of(True)) if quick else Measured()
    outcomes = {file.stem: measure_plants(PlantFile.read(file), model, size, progress) for file in files}
    return held_out_result(outcomes, quick)


def held_out_result(outcomes: Mapping[str, Outcome], quick: bool = False) -> ClaimResult:
    """The verdict over all LoRAs: of pictures that copy untouched, by half or more of their samples."""
    blocked, untouched = [], []
    for outcome in outcomes.values():
        ways = [way for way in outcome.away if way.startswith("blocked")]
        blocked += [(outcome.away[way] < outcome.copy)[outcome.copied].flatten() for way in ways]
        untouched.append((outcome.away["untouched"] < outcome.copy)[outcome.copied].flatten())
    left, before = torch.cat(blocked), torch.cat(untouched)
    copies, interval = int(left.sum()), share_interval(int(left.sum()), len(left))
    fraction = copies / max(1, len(left))
    lost = max(o.agreement[0] - o.agreement[1] for o in outcomes.values())
    missed = sum(_missed(outcome) for outcome in outcomes.values())
    ordinary = [agreement for outcome in outcomes.values() for agreement in outcome.ordinary]
    alarms = sum(agreement.memorized for agreement in ordinary)
    span = share_interval(alarms, len(ordinary))
    parts = {
        "at most 5 % of samples copy": (interval[0] if quick else fraction) <= 0.05,
        "ordinary captions lose at most 2 points": quick or lost <= 0.02,
        "every verbatim picture that copies is detected": not missed,
        "no more than 1 % of ordinary captions are false alarms": span[0] <= 0.01,
    }
    return ClaimResult(
        round(fraction, 3),
        interval,
        len(left) > 0 and all(parts.values()),
        {
            "samples that copy": f"{copies} of {len(left)}, untouched {int(before.sum())} of {len(before)}",
            "prompt agreement that ordinary captions lose, at most": round(lost, 4),
            "copied verbatim pictures that detection misses": missed,
            "false alarms": [f"{alarms} of {len(ordinary)}", span],
            **{name: outcome.table() for name, outcome in outcomes.items()},
        },
        arms=_arms(outcomes, fraction, interval),
        n=len(before),
        seeds=1 if quick else 3,
        parts=parts,
        tables=_tables(outcomes, (alarms, len(ordinary), *span)),
    )


def _arms(outcomes: Mapping[str, Outcome], share: float, interval: Sequence[float]) -> tuple[Arm, ...]:
    """Ours, and the baselines over the same pictures: those that copy untouched."""

    def left(way: str) -> float:
        rows = [(each.away[way] < each.copy)[each.copied].flatten() for each in outcomes.values() if way in each.away]
        return float(torch.cat(rows).float().mean()) if rows else float("nan")

    roles = dict.fromkeys(RIVALS, "rival")
    roles |= dict.fromkeys(("as many random neurons", BARE, BASE, "untouched"), "trivial")
    values = {"ours": share} | {way: value for way in roles if (value := left(way)) == value}
    return arms(values, {"ours": "ours"} | roles, {"ours": interval})


def _tables(outcomes: Mapping[str, Outcome], alarms: Sequence[float]) -> tuple[Table, ...]:
    """By LoRA: copies under each remedy, neurons, detection; what samples still show of the caption."""
    ways = list(dict.fromkeys(way for outcome in outcomes.values() for way in outcome.away))
    copies = [(name, *(_share(o, way) for way in ways)) for name, o in outcomes.items()]
    shown = [(way, *(round(o.shown[way], 3) if way in o.shown else "-" for o in outcomes.values())) for way in ways]
    detected = [(name, _memorized(o.memorized), _memorized(o.ordinary)) for name, o in outcomes.items()]
    count, of, low, high = alarms
    detected.append(("all, false alarms with 95 %", "", f"{count} of {of}: {low:g} to {high:g}"))
    return (
        Table("Fraction of samples that copy", ("LoRA", *ways), tuple(copies)),
        Table("Fraction of the caption's attributes that samples show", ("remedy", *outcomes), tuple(shown)),
        Table("Detection by few-step samples", ("LoRA", "memorized pictures found", "false alarms"), tuple(detected)),
    )


def _memorized(agreements: Sequence[FewStepAgreement]) -> str:
    return f"{sum(agreement.memorized for agreement in agreements)} of {len(agreements)}"


def _share(outcome: Outcome, way: str) -> float | str:
    """Of samples that copy, over all pictures of a LoRA."""
    return round(float(outcome.shares(way).mean()), 3) if way in outcome.away else "-"


def _missed(outcome: Outcome) -> int:
    """Of the verbatim pictures that copy untouched, those that the measured threshold does not find."""
    detected = torch.tensor([agreement.memorized for agreement in outcome.memorized])
    return int((outcome.copied & outcome.verbatim & ~detected).sum())


@claim(
    "nemo.seeds", paper=f"{PAPER}: its search looks at the noises of one seed",
    figure="Jaccard of the neurons of two consensus sets, of three searches each that share no seed",
    target="above the mean Jaccard of two single searches, by a 95 % interval over pictures",
    minutes=6, quick_minutes=0.8,
)  # fmt: skip
def seeds(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Searches from other noises, their consensus, and what blocking leaves of the shipped memorized pictures."""
    budget = budget_of(quick)
    probed, plants = setting(model, progress, budget), verbatim(budget)
    prompts = [p.captions[0] for p in plants]
    single = {s: _sets(probed, prompts, s) for triple in TRIPLES for s in triple}
    agreed = [
        [consensus([single[s][i] for s in triple], 0.5) for i in range(len(plants))] for triple in TRIPLES
    ]  # of two of three searches
    first, second = ([single[s] for s in triple] for triple in TRIPLES)
    across = [[jaccard(a[i], b[i]) for a in first for b in second] for i in range(len(plants))]  # as consensus sets are
    agreement = Agreement(across, [jaccard(a, b) for a, b in zip(*agreed, strict=True)])
    together, interval = agreement.together, mean_interval(agreement.gain)
    left = {f"one search, seed {s}": _copied(probed, plants, sets, budget) for s, sets in single.items()}
    left |= {f"consensus of {t}": _copied(probed, plants, s, budget) for t, s in zip(TRIPLES, agreed, strict=True)}
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
    """(P, seeds) pixel RMS between samples and their memorized picture."""

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


def _sets(probed: ProbedModel, prompts: Sequence[str], seed: int) -> list[NeuronSet]:
    """Neurons of each prompt by a search from one seed's noises."""
    looking = replace(probed, probe=replace(probed.probe, seed=seed))
    return [looking.neurons(r) for r in looking.find(prompts)]


def _copied(probed: ProbedModel, plants: Sequence[Any], sets: Sequence[NeuronSet], budget: SampleBudget) -> Copied:
    rows, chosen = [], SEEDS[: budget.seeds]
    for plant, neurons in zip(plants, sets, strict=True):
        images = probed.sample([plant.captions[0]] * len(chosen), chosen, neurons)
        rows.append((images - probed.model.draw(plant.scenes)).square().mean((1, 2, 3)).sqrt())
    return Copied(torch.stack(rows))


def _size(sets: Sequence[NeuronSet]) -> float:
    return sum(map(len, sets)) / len(sets)
