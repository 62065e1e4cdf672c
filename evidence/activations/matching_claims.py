"""Claims about correspondence and segmentation on held-out portraits: ``vitrine reproduce 'gdf.*'``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...engine.activations.filter import FilterRule
from ...engine.activations.greedy_search import ScoreOf, SearchResult, greedy_search
from ...engine.activations.presets import PRESETS
from ...engine.activations.segmentation import (
    ProbeSettings,
    bootstrap_iou,
    bootstrap_iou_gain,
    bootstrap_mean,
    confusion,
    fit_probe,
    iou,
    mean_iou,
)
from ...engine.portraits import PARTS
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .measures import by_pair, correspondence_score
from .world import CHOOSING, LABELLED, PAPER, SHOTS, TESTING, Pictures, score_places, tap_pictures

if TYPE_CHECKING:
    from ...engine.portraits import Portraits

HELD_OUT, TEST = 60, 200
QUICK_HELD_OUT, QUICK_TEST, QUICK_PIXELS = 40, 60, 256
LEGACY = PRESETS["portraits-legacy"].addresses


@dataclass(frozen=True)
class Choice:
    """Places chosen on held-out portraits, beside those that were used before GDF.

    Attributes:
        candidates: what the filter keeps.
        search: the greedy search among them.
        narrow: the same search with no more channels than legacy has, because more channels alone help a probe.
        widths: channels of each place.
    """

    candidates: list[str]
    search: SearchResult
    narrow: SearchResult
    widths: dict[str, int]

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """Name of each choice -> its places."""
        return {"legacy": LEGACY, "chosen": self.search.chosen, "chosen, legacy's width": self.narrow.chosen}

    @property
    def addresses(self) -> list[str]:
        """All places that must be tapped to test the choice."""
        return list(dict.fromkeys((*self.search.chosen, *self.narrow.chosen, *LEGACY)))

    def details(self) -> dict[str, Any]:
        """For the claim's result: places, their channels, the best singles."""
        best = list(self.search.singles.items())[:5]
        return {
            "places": {name: list(addresses) for name, addresses in self.places.items()},
            "channels": {name: sum(self.widths[a] for a in addresses) for name, addresses in self.places.items()},
            "places after the filter": len(self.candidates),
            "best alone": {address: round(score, 3) for address, score in best},
        }


def choose_places(
    portraits: Portraits, count: int, score: Callable[[Pictures, tuple[str, ...]], float], pool: int, progress: Progress
) -> Choice:
    """Filter, then search by ``score`` on ``count`` portraits that no claim tests on."""
    candidates, _ = FilterRule().apply(score_places(portraits, CHOOSING, progress))
    held_out = tap_pictures(portraits, CHOOSING, count, [*dict.fromkeys((*candidates, *LEGACY))], progress)
    score_of = _remembered(lambda places: score(held_out, places))
    search = greedy_search(candidates, score_of, most=3, pool=pool, progress=progress)
    widths = held_out.widths
    budget = sum(widths[a] for a in LEGACY)
    narrow = greedy_search(candidates, score_of, channels=widths, budget=budget, most=4, pool=len(candidates))
    return Choice(candidates, search, narrow, widths)


def _remembered(score_of: ScoreOf) -> ScoreOf:
    """Both searches ask for the same singles."""
    scores: dict[tuple[str, ...], float] = {}

    def score(places: tuple[str, ...]) -> float:
        key = tuple(sorted(places))
        if key not in scores:
            scores[key] = score_of(places)
        return scores[key]

    return score


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(bound, 4) for bound in interval]


@claim(
    "gdf.correspondence",
    paper=PAPER,
    figure="Table 1: better places beat the places used before (there SPair-71k; here keypoints of 200 portraits)",
    target="PCK@0.1 of the chosen places above legacy ones, outside the 95 % bootstrap interval of the difference",
    minutes=0.3,
    quick_minutes=0.15,
)
def correspondence(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Raw pixels, legacy places, and places chosen by filter and search on held-out portraits, on 200 pairs."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    choice = choose_places(portraits, held_out, lambda p, a: correspondence_score(p, p.features(a))[0], 8, progress)
    test = tap_pictures(portraits, TESTING, tested, choice.addresses, progress)
    places = {"raw pixels": ("pixels",), **choice.places}
    scores = {name: correspondence_score(test, test.features(addresses)) for name, addresses in places.items()}
    by_picture = {name: score[1] for name, score in scores.items()}
    gain = bootstrap_mean(by_pair(by_picture["chosen"] - by_picture["legacy"]))
    same_width = bootstrap_mean(by_pair(by_picture["chosen, legacy's width"] - by_picture["legacy"]))
    low, high = _rounded(bootstrap_mean(by_pair(by_picture["chosen"])))
    return ClaimResult(
        value=round(scores["chosen"][0], 4),
        interval=(low, high),
        holds=gain[0] > 0,
        details={
            "PCK@0.1": {name: round(value, 4) for name, (value, _) in scores.items()},
            "gain over legacy, 95 %": _rounded(gain),
            "gain over legacy at its width, 95 %": _rounded(same_width),
            **choice.details(),
        },
    )


def _predict(
    train: Pictures, test: Pictures, addresses: tuple[str, ...], settings: ProbeSettings | None = None
) -> torch.Tensor:
    """(B, 64, 64) parts of the test pictures, by a linear probe fitted on the training pictures."""
    probe = fit_probe(train.features(addresses), train.parts, len(PARTS), settings)
    return probe.predict(test.features(addresses), (64, 64))


def _score_parts(held_out: Pictures, addresses: tuple[str, ...], settings: ProbeSettings | None = None) -> float:
    """mIoU, the first twenty portraits labelled."""
    train, test = held_out.take(slice(0, SHOTS)), held_out.take(slice(SHOTS, None))
    return mean_iou(_predict(train, test, addresses, settings), test.parts, len(PARTS))[0]


@claim(
    "gdf.segmentation",
    paper=PAPER,
    figure="Table 2, few labels: better places beat the places used before (here parts of 200 portraits, 20 labelled)",
    target="mIoU of the chosen places above legacy ones, bootstrap intervals apart (chosen may have more channels)",
    minutes=0.7,
    quick_minutes=0.5,
)
def segmentation(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """A linear probe on 20 labelled portraits, tested on 200 others."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    settings = ProbeSettings(pixels=QUICK_PIXELS) if quick else None  # of the search; what it chose is tested in full
    choice = choose_places(portraits, held_out, lambda p, a: _score_parts(p, a, settings), 6, progress)
    train = tap_pictures(portraits, LABELLED, SHOTS, choice.addresses, progress)
    test = tap_pictures(portraits, TESTING, tested, choice.addresses, progress)
    places = {"raw pixels": ("pixels",), **choice.places}
    tables = {
        name: confusion(_predict(train, test, addresses), test.parts, len(PARTS)) for name, addresses in places.items()
    }
    spans = {name: bootstrap_iou(table) for name, table in tables.items()}
    values = {name: round(iou(table.sum(0))[0], 4) for name, table in tables.items()}
    low, high = _rounded(spans["chosen"])
    same_width = bootstrap_iou_gain(tables["chosen, legacy's width"], tables["legacy"])
    return ClaimResult(
        value=values["chosen"],
        interval=(low, high),
        holds=spans["chosen"][0] > spans["legacy"][1],
        details={
            "mIoU": values,
            "95 %": {name: _rounded(span) for name, span in spans.items()},
            "gain over legacy, 95 %": _rounded(bootstrap_iou_gain(tables["chosen"], tables["legacy"])),
            "gain over legacy at its width, 95 %": _rounded(same_width),
            **choice.details(),
        },
    )
