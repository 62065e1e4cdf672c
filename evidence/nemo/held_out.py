"""Held-out memorized pictures: whether what was chosen on the shipped ones holds on those of other LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.few_step_detection import Agreement
from ...engine.runtime.progress import Progress, silent
from ..registry import Arm, ClaimResult, Table, arms, claim
from .later_plants import FILE, FURTHER, NEW, SETS
from .memorized_sets import BARE, BASE, RANDOM, UNTOUCHED, Measured, Outcome, Picture, measure_plants
from .plant_files import PlantFile
from .probed_model import PAPER
from .rivals import RIVALS

MOST_COPIES, MOST_LIKELY, MOST_LOST = 0.05, 0.08, 0.02
"""Of samples that may copy, the upper end of their interval, and prompt agreement that ordinary captions may lose."""
FEWER = {"later-plants": 4, "plants-twice": 1, "plants-thirty": 2, "plants-shirts": 2}
"""How many pictures, the first ones, of kinds of which no sample copied any more when all were measured (00e8509)."""
QUICK = Measured(
    plants=1, samples=3, blocked=3, others=2, ordinary=10, agreement=6, statistics=100, calibration=20, steps=10
)


@claim(
    "nemo.held_out",
    paper=PAPER,
    figure="held-out memorized pictures: fraction of single samples that still copy after blocking, in the kind of "
    "pictures where it is largest",
    target="of each kind surely below 8 % of samples, at most 5 % measured; ordinary captions lose at most 2 points. "
    "What still copies is not called cured; each verbatim copy is detected; false alarms can be 1 %",
    minutes=115,
    quick_minutes=1.2,
)
def held_out(
    model: str | None = None,
    progress: Progress = silent,
    quick: bool = False,
    plants: str | None = None,
    state: str | None = None,
) -> ClaimResult:
    """Detection, search and dose as they were chosen on other pictures, on pictures memorized later, by LoRAs.

    ``plants`` is another list of memorized pictures, see :mod:`vitrine.evidence.nemo.plant_files`; by default all that
    ship are measured, and of a quick run the first one. ``state`` is a folder for what is measured so far.
    """
    files = [Path(plants)] if plants else [FILE] if quick else [FILE, *FURTHER]
    size, folder = QUICK if quick else Measured(), None if state is None else Path(state)
    outcomes = {}
    for file in files:
        each = replace(size, plants=min(size.plants, FEWER.get(file.stem, size.plants)))
        outcomes[file.stem] = measure_plants(PlantFile.read(file), file.stem, model, each, progress, folder)
    return held_out_result(outcomes, size.searches, quick)


def held_out_result(
    outcomes: Mapping[str, Outcome], searches: Sequence[int] = (1,), quick: bool = False
) -> ClaimResult:
    """The verdict over all LoRAs: of pictures that copy untouched, by half or more of their samples."""
    kinds = _kinds(outcomes)
    counts = {kind: _left(pictures) for kind, pictures in kinds.items()}
    spans = {kind: share_interval(copies, count) for kind, (copies, count) in counts.items()}
    worst = max(counts, key=lambda kind: (counts[kind][0] / counts[kind][1], spans[kind][1]), default="")
    copies, count = counts.get(worst, (0, 0))
    fraction, interval = copies / max(1, count), share_interval(copies, max(1, count))
    lost = {name: each.agreement[0] - each.agreement[1] for name, each in outcomes.items()}
    every = [(outcome, picture) for pictures in kinds.values() for outcome, picture in pictures]
    copying, unsaid, shy = _copying(every)
    missed = sum(_missed(outcome) for outcome in outcomes.values())
    ordinary = [agreement for outcome in outcomes.values() for agreement in outcome.ordinary]
    alarms = sum(agreement.memorized for agreement in ordinary)
    span = share_interval(alarms, len(ordinary))
    parts = {
        "at most 5 % of samples copy in each kind": (interval[0] if quick else fraction) <= MOST_COPIES,
        "surely fewer than 8 % in each kind": quick or all(high < MOST_LIKELY for _, high in spans.values()),
        "ordinary captions lose at most 2 points": quick or max(lost.values()) <= MOST_LOST,
        "what still copies is never called cured": not unsaid,
        "every verbatim picture that copies is detected": not missed,
        "no more than 1 % of ordinary captions are false alarms": span[0] <= 0.01,
    }
    whole = sum(c for c, _ in counts.values()), sum(n for _, n in counts.values())
    return ClaimResult(
        round(fraction, 3),
        interval,
        count > 0 and all(parts.values()),
        {
            "kind with most copies": worst,
            "sets not measured": [] if quick else sorted(set(SETS) - set(outcomes)),
            "sets made after the others had been measured once": [name for name in NEW if name in outcomes],
            "samples that copy, all kinds": f"{whole[0]} of {whole[1]}",
            "prompt agreement that ordinary captions lose": {name: round(value, 4) for name, value in lost.items()},
            "pictures of which more than 5 % of samples copy, and those called cured": [copying, unsaid],
            "other pictures, and those of them not called cured": [len(every) * len(searches) - copying, shy],
            "UNet evaluations of a search with its doses, mean": {
                name: round(sum(n for p in outcome.pictures for n in p.rows) / len(outcome.pictures) / len(searches))
                for name, outcome in outcomes.items()
            },
            "copied verbatim pictures that detection misses": missed,
            "false alarms": [f"{alarms} of {len(ordinary)}", span],
            **{name: outcome.table() for name, outcome in outcomes.items()},
        },
        arms=_arms(kinds.get(worst, []), fraction, interval),
        n=whole[1],
        seeds=len(searches),
        parts=parts,
        tables=_tables(kinds, outcomes, (alarms, len(ordinary), *span)),
    )


Pictures = list[tuple[Outcome, Picture]]
"""That copy untouched, each with the figures of its LoRA."""


def _kinds(outcomes: Mapping[str, Outcome]) -> dict[str, Pictures]:
    kinds: dict[str, Pictures] = {}
    for outcome in outcomes.values():
        for picture in outcome.pictures:
            if outcome.copied(picture):
                kinds.setdefault(picture.kind, []).append((outcome, picture))
    return kinds


def _blocked(picture: Picture) -> list[str]:
    return [way for way in picture.away if way.startswith("blocked")]


def _left(pictures: Pictures) -> tuple[int, int]:
    """(copies, samples) under the neurons of all searches."""
    rows = [outcome.copies(picture, way) for outcome, picture in pictures for way in _blocked(picture)]
    return sum(int(row.sum()) for row in rows), sum(map(len, rows))


def _copying(pictures: Pictures) -> tuple[int, int, int]:
    """Searches that leave more than 5 % of copies, those of them that say cured, of the others those that do not."""
    copying = unsaid = shy = 0
    for outcome, picture in pictures:
        for way, verdict in zip(_blocked(picture), picture.verdicts, strict=True):
            if float(outcome.copies(picture, way).float().mean()) > MOST_COPIES:
                copying, unsaid = copying + 1, unsaid + (verdict == "cured")
            else:
                shy += verdict != "cured"
    return copying, unsaid, shy


def _arms(pictures: Pictures, fraction: float, interval: Sequence[float]) -> tuple[Arm, ...]:
    """Ours in its worst kind, and the baselines on the same pictures."""

    def left(way: str) -> float:
        rows = [outcome.copies(picture, way) for outcome, picture in pictures if way in picture.away]
        return float(torch.cat(rows).float().mean()) if rows else float("nan")

    roles = dict.fromkeys(RIVALS, "rival") | dict.fromkeys((RANDOM, BARE, BASE, UNTOUCHED), "trivial")
    values = {"ours": fraction} | {way: value for way in roles if (value := left(way)) == value}
    return arms(values, {"ours": "ours"} | roles, {"ours": interval})


def _tables(
    kinds: Mapping[str, Pictures], outcomes: Mapping[str, Outcome], alarms: Sequence[float]
) -> tuple[Table, ...]:
    """By kind of picture: copies under each remedy, what samples show, seconds; by LoRA: detection."""
    ways = list(dict.fromkeys(way for pictures in kinds.values() for _, picture in pictures for way in picture.away))

    def row(kind: str, pictures: Pictures, of: str) -> tuple[object, ...]:
        cells: list[object] = []
        for way in ways:
            known = [(outcome, picture) for outcome, picture in pictures if way in picture.away]
            values = {
                "copies": [float(outcome.copies(picture, way).float().mean()) for outcome, picture in known],
                "shown": [picture.shown[way] for _, picture in known],
                "seconds": [picture.seconds[way] for _, picture in known],
            }[of]
            cells.append(round(sum(values) / len(values), 3) if values else "-")
        return kind, len(pictures), *cells

    head = ("kind", "pictures that copy", *ways)
    tables = [
        Table(title, head, tuple(row(kind, pictures, of) for kind, pictures in kinds.items()))
        for title, of in (
            ("Fraction of samples that copy", "copies"),
            ("Fraction of the caption's attributes that samples show", "shown"),
            ("Seconds of processor time: search or adjustment with samples", "seconds"),
        )
    ]
    judged = tuple(
        (kind, f"{copies} of {count}", str(share_interval(copies, count)), _verdicts(pictures))
        for kind, pictures in kinds.items()
        for copies, count in (_left(pictures),)
    )
    tables.append(
        Table("Samples that copy after blocking", ("kind", "samples", "95 %", "verdicts of the search"), judged)
    )
    detected = [(name, _memorized(o.memorized), _memorized(o.ordinary)) for name, o in outcomes.items()]
    count, of, low, high = alarms
    detected.append(("all, false alarms with 95 %", "", f"{count} of {of}: {low:g} to {high:g}"))
    columns = ("LoRA", "memorized pictures detected", "false alarms")
    return (*tables, Table("Detection by few-step samples", columns, tuple(detected)))


def _verdicts(pictures: Pictures) -> str:
    verdicts = [verdict for _, picture in pictures for verdict in picture.verdicts]
    return ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))


def _memorized(agreements: Sequence[Agreement]) -> str:
    return f"{sum(agreement.memorized for agreement in agreements)} of {len(agreements)}"


def _missed(outcome: Outcome) -> int:
    """Of the verbatim pictures that copy untouched, those that the measured threshold does not find."""
    pairs = zip(outcome.pictures, outcome.memorized, strict=True)
    return sum(outcome.copied(p) and p.verbatim and not agreement.memorized for p, agreement in pairs)
