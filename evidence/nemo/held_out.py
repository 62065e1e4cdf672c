"""Held-out memorized pictures: whether what was chosen on the shipped ones holds on those of other LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.few_step_detection import Agreement
from ...engine.runtime.progress import Progress, silent
from ..registry import Arm, ClaimResult, Table, arms, claim
from .later_plants import FILE, FURTHER
from .memorized_sets import BARE, BASE, Measured, Outcome, measure_plants
from .plant_files import PlantFile
from .probed_model import PAPER, budget_of
from .rivals import RIVALS


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


def _memorized(agreements: Sequence[Agreement]) -> str:
    return f"{sum(agreement.memorized for agreement in agreements)} of {len(agreements)}"


def _share(outcome: Outcome, way: str) -> float | str:
    """Of samples that copy, over all pictures of a LoRA."""
    return round(float(outcome.shares(way).mean()), 3) if way in outcome.away else "-"


def _missed(outcome: Outcome) -> int:
    """Of the verbatim pictures that copy untouched, those that the measured threshold does not find."""
    detected = torch.tensor([agreement.memorized for agreement in outcome.memorized])
    return int((outcome.copied & outcome.verbatim & ~detected).sum())
