"""Correspondence and segmentation on held-out portraits: ``vitrine reproduce 'gdf.*'``; the other claims by import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.activations.presets import PRESETS
from ...engine.activations.qualitative_filter import filtered
from ...engine.activations.segmentation import ProbeSettings, confusion, fit_probe, iou, mean_iou
from ...engine.activations.site_search import Budget, ScoreOf, SearchResult, greedy_search
from ...engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.ranking_options import FilterRule
from ..intervals import iou_gain_interval, iou_interval, mean_interval
from ..registry import ClaimResult, Table, arms, claim
from . import filter_claims as _filter  # noqa: F401  registers gdf.filter, gdf.filter.flow and gdf.properties
from . import photograph_claims as _photographs  # noqa: F401  registers gdf.*.photographs
from .measures import by_pair, correspondence_score
from .tapped_pictures import (
    CHOOSING,
    LABELLED,
    PAPER,
    SHOTS,
    TESTING,
    TIMESTEP,
    Model,
    Pictures,
    inter_module_sites,
    score_sites,
    tap_pictures,
    untrained,
)

HELD_OUT_COUNT, TEST_COUNT = 60, 200
QUICK_HELD_OUT_COUNT, QUICK_TEST_COUNT, QUICK_PIXELS = 40, 60, 256
PRIOR_LAYERS = PRESETS["portraits-legacy"].addresses

ALPHAS = (0.05, 0.1)
FLOW_HELD_OUT_COUNT = 120
FLOW_PRIOR_LAYERS = ("vit-block3-in",)
"""DiTF's layer in Flux, the 29th of 57 blocks, mapped to six blocks."""
MODULATED_PRIOR = "prior work's layer, modulated (DiTF)"
FLOW_TIMESTEPS, QUICK_FLOW_TIMESTEPS = (50.0, 260.0), (260.0,)
"""GDF's and DiTF's timesteps; the better one is chosen on other portraits than those of the test."""
ROLES = {
    "chosen": "ours",
    "inter-module, same search": "rival",
    "prior work's layers": "rival",
    MODULATED_PRIOR: "rival",
    "chosen, at prior work's width": "reference",
    "chosen, untrained network": "trivial",
    "copied coordinates": "trivial",
    "Fourier coordinates": "trivial",
    "raw pixels": "trivial",
}


@dataclass(frozen=True)
class Choice:
    """Sites chosen on held-out portraits, and prior-work layers for comparison.

    Attributes:
        candidates: sites that the filter keeps.
        search: the greedy search among them.
        narrow: the same search with at most the channels of the prior-work layers, since more channels alone help a
            probe.
        between: the same search among inter-module sites, which prior work could tap, without a filter.
        widths: channels of each site.
        legacy: prior-work layers.
        timestep: of all taps.
    """

    candidates: list[str]
    search: SearchResult
    narrow: SearchResult
    between: SearchResult
    widths: dict[str, int]
    prior: tuple[str, ...] = PRIOR_LAYERS
    timestep: float = TIMESTEP

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """Name of each choice -> its sites."""
        return {
            "prior work's layers": self.prior,
            "chosen": self.search.chosen,
            "chosen, at prior work's width": self.narrow.chosen,
            "inter-module, same search": self.between.chosen,
        }

    @property
    def addresses(self) -> list[str]:
        """All sites that must be tapped to test the choice."""
        return list(dict.fromkeys(a for sites in self.sites.values() for a in sites))

    def details(self) -> dict[str, Any]:
        """Details of the claim's result: sites, their channels, the best single sites."""
        best = list(self.search.singles.items())[:5]
        return {
            "places": {name: list(addresses) for name, addresses in self.sites.items()},
            "channels": {name: sum(self.widths[a] for a in addresses) for name, addresses in self.sites.items()},
            "places after the filter": len(self.candidates),
            "best alone, where they were chosen": {address: round(score, 3) for address, score in best},
        }


def choose_sites(
    portraits: Model,
    count: int,
    score: Callable[[Pictures, tuple[str, ...]], float],
    pool: int,
    progress: Progress,
    *,
    timestep: float = TIMESTEP,
    prior: tuple[str, ...] = PRIOR_LAYERS,
) -> Choice:
    """Filters, then searches by ``score`` on ``count`` misaligned portraits that no claim tests on."""
    candidates, _ = filtered(FilterRule(), score_sites(portraits, CHOOSING, progress, timestep=timestep))
    between = inter_module_sites(portraits)
    wanted = list(dict.fromkeys((*candidates, *between, *prior)))
    held_out = tap_pictures(portraits, CHOOSING, count, wanted, progress, misaligned=True, timestep=timestep)
    score_of = _remembered(lambda sites: score(held_out, sites))
    search = greedy_search(candidates, score_of, most=3, pool=pool, progress=progress)
    earlier = greedy_search(between, score_of, most=3, pool=pool, progress=progress)
    widths = held_out.widths
    budget = Budget(widths, sum(widths[a] for a in prior))
    narrow = greedy_search(candidates, score_of, budget=budget, most=4, pool=pool)
    return Choice(candidates, search, narrow, earlier, widths, prior, timestep)


def _remembered(score_of: ScoreOf) -> ScoreOf:
    """Caches scores, since the searches score the same single sites."""
    scores: dict[tuple[str, ...], float] = {}

    def score(sites: tuple[str, ...]) -> float:
        key = tuple(sorted(sites))
        if key not in scores:
            scores[key] = score_of(sites)
        return scores[key]

    return score


def _features(choice: Choice, test: Pictures, random: Pictures) -> dict[str, torch.Tensor | None]:
    """Name -> features of the test images: trivial baselines first; None copies coordinates."""
    baselines: dict[str, torch.Tensor | None] = {
        "copied coordinates": None,
        "Fourier coordinates": test.features(("coordinates",)),
        "raw pixels": test.features(("pixels",)),
        "chosen, untrained network": random.features(choice.search.chosen),
    }
    return baselines | {name: test.features(sites) for name, sites in choice.sites.items()}


@claim(
    "gdf.correspondence",
    paper=PAPER,
    figure="Table 1: better layers beat the layers used before (there SPair-71k; here keypoints of 200 misaligned "
    "portraits: cropped, shifted, rotated, scaled, flipped)",
    target="PCK@0.1 of the chosen layers above copied coordinates and above the same search over inter-module layers, "
    "outside the 95 % bootstrap interval of each difference",
    minutes=0.6,
    quick_minutes=0.25,
)
def correspondence(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Trivial baselines, prior-work layers, and sites chosen by filter and search, on 200 held-out pairs."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    held_out, tested = (QUICK_HELD_OUT_COUNT, QUICK_TEST_COUNT) if quick else (HELD_OUT_COUNT, TEST_COUNT)
    choice = choose_sites(portraits, held_out, score_points, 8, progress)
    return measure_points(portraits, choice, tested, progress)


@claim(
    "gdf.correspondence.flow",
    paper=PAPER,
    figure="gdf.correspondence on the flow model: keypoints of 200 misaligned portraits of 128 px",
    target="PCK@0.1 of the chosen layers above copied coordinates and above the same search over blocks' inputs and "
    "outputs, outside the 95 % bootstrap interval of each difference",
    minutes=2,
    quick_minutes=0.25,
)
def correspondence_flow(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.correspondence, with the same filter rule; the prior-work layer is DiTF's, raw and modulated."""
    portraits = load_flow_portraits(model or FLOW_WEIGHTS)
    held_out, tested = (QUICK_HELD_OUT_COUNT, QUICK_TEST_COUNT) if quick else (FLOW_HELD_OUT_COUNT, TEST_COUNT)
    choices = [
        choose_sites(portraits, held_out, score_points, 8, progress, timestep=t, prior=FLOW_PRIOR_LAYERS)
        for t in (QUICK_FLOW_TIMESTEPS if quick else FLOW_TIMESTEPS)
    ]
    choice = max(choices, key=lambda c: c.search.score)
    result = measure_points(portraits, choice, tested, progress, modulated=True)
    result.details["timestep"] = choice.timestep
    result.details["by timestep, where it was chosen"] = {c.timestep: round(c.search.score, 4) for c in choices}
    return result


def score_points(pictures: Pictures, sites: tuple[str, ...]) -> float:
    """PCK@0.1 of sites in combination."""
    return correspondence_score(pictures, pictures.features(sites))[0]


def measure_points(
    portraits: Model, choice: Choice, tested: int, progress: Progress, modulated: bool = False
) -> ClaimResult:
    """The choice and trivial baselines on ``tested`` held-out misaligned portraits.

    Args:
        modulated: whether the prior-work layer is an arm after modulation, too, as DiTF reads it.
    """
    at: dict[str, Any] = {"progress": progress, "misaligned": True, "timestep": choice.timestep}
    test = tap_pictures(portraits, TESTING, tested, choice.addresses, **at)
    random = tap_pictures(untrained(portraits), TESTING, tested, choice.search.chosen, **at)
    features = _features(choice, test, random)
    if modulated:
        tapped = tap_pictures(portraits, TESTING, tested, choice.prior, **at, modulate=True)
        features[MODULATED_PRIOR] = tapped.features(choice.prior)
    scores = {a: {name: correspondence_score(test, f, a) for name, f in features.items()} for a in ALPHAS}
    gains = {alpha: _gains({name: score[1] for name, score in table.items()}) for alpha, table in scores.items()}
    low, high = mean_interval(by_pair(scores[0.1]["chosen"][1]))
    return ClaimResult(
        value=round(scores[0.1]["chosen"][0], 4),
        interval=(low, high),
        holds=all(gains[0.1][name][0] > 0 for name in RIVALS),
        details={
            f"PCK@{alpha}": {name: round(value, 4) for name, (value, _) in table.items()}
            for alpha, table in scores.items()
        }
        | {f"gain of the chosen at {alpha}, 95 %": spans for alpha, spans in gains.items()}
        | choice.details(),
        arms=arms(
            {name: value for name, (value, _) in scores[0.1].items()},
            ROLES,
            {name: mean_interval(by_pair(each)) for name, (_, each) in scores[0.1].items()},
        ),
        n=tested,
        parts={f"above {name}": gains[0.1][name][0] > 0 for name in RIVALS},
        tables=(
            _gain_table(gains[0.1]),
            Table(
                "At 0.05", ("features", "PCK@0.05"), tuple((name, value) for name, (value, _) in scores[0.05].items())
            ),
        ),
    )


RIVALS = ("copied coordinates", "inter-module, same search")


def _gains(by_picture: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Name -> 95 % interval of the gain of the chosen sites, by paired resampling."""
    others = {name: values for name, values in by_picture.items() if name != "chosen"}
    return {name: list(mean_interval(by_pair(by_picture["chosen"] - values))) for name, values in others.items()}


def _gain_table(gains: Mapping[str, Sequence[float]]) -> Table:
    rows = tuple((name, low, high) for name, (low, high) in gains.items())
    return Table("What the chosen layers are better by, 95 %", ("over", "low", "high"), rows)


def _predict(
    train: torch.Tensor, parts: torch.Tensor, test: torch.Tensor, classes: int, settings: ProbeSettings | None = None
) -> torch.Tensor:
    """(B, H, W) parts of the test images, by a linear probe fitted on features and (b, H, W) parts of others."""
    return fit_probe(train, parts, classes, settings).predict(test, (parts.shape[-2], parts.shape[-1]))


def score_parts(held_out: Pictures, addresses: tuple[str, ...], settings: ProbeSettings | None = None) -> float:
    """mIoU of sites in combination, with the first twenty portraits labelled."""
    features = held_out.features(addresses)
    classes = held_out.classes
    predicted = _predict(features[:SHOTS], held_out.parts[:SHOTS], features[SHOTS:], classes, settings)
    return mean_iou(predicted, held_out.parts[SHOTS:], classes)[0]


@claim(
    "gdf.segmentation",
    paper=PAPER,
    figure="Table 2, few labels: better layers beat the layers used before (here parts of 200 misaligned portraits, 20 "
    "labelled)",
    target="mIoU of the chosen layers above Fourier coordinates and above the same search over inter-module layers, "
    "outside the 95 % bootstrap interval of each difference",
    minutes=1.2,
    quick_minutes=0.6,
)
def segmentation(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """A linear probe on 20 labelled portraits, tested on 200 others."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    held_out, tested = (QUICK_HELD_OUT_COUNT, QUICK_TEST_COUNT) if quick else (HELD_OUT_COUNT, TEST_COUNT)
    settings = ProbeSettings(pixels=QUICK_PIXELS) if quick else None  # of the search; its choice is tested in full
    choice = choose_sites(portraits, held_out, lambda p, a: score_parts(p, a, settings), 6, progress)
    at: dict[str, Any] = {"progress": progress, "misaligned": True}
    fresh, chosen = untrained(portraits), choice.search.chosen
    train, test = (
        tap_pictures(portraits, first, count, choice.addresses, **at)
        for first, count in ((LABELLED, SHOTS), (TESTING, tested))
    )
    known = _features(choice, train, tap_pictures(fresh, LABELLED, SHOTS, chosen, **at))
    new = _features(choice, test, tap_pictures(fresh, TESTING, tested, chosen, **at))
    tables = {
        name: confusion(_predict(features, train.parts, wanted, test.classes), test.parts, test.classes)
        for name, features in known.items()
        if features is not None and (wanted := new[name]) is not None
    }
    spans = {name: iou_interval(table) for name, table in tables.items()}
    gains = {name: iou_gain_interval(tables["chosen"], t) for name, t in tables.items() if name != "chosen"}
    beaten = {name: gains[name][0] > 0 for name in ("Fourier coordinates", RIVALS[1])}
    values = {name: iou(table.sum(0))[0] for name, table in tables.items()}
    return ClaimResult(
        value=round(values["chosen"], 4),
        interval=spans["chosen"],
        holds=all(beaten.values()),
        details={
            "mIoU": {name: round(value, 4) for name, value in values.items()},
            "95 %": {name: list(span) for name, span in spans.items()},
            "gain of the chosen, 95 %": {name: list(gain) for name, gain in gains.items()},
            **choice.details(),
        },
        arms=arms(values, ROLES, spans),
        n=tested,
        parts={f"above {name}": above for name, above in beaten.items()},
        tables=(_gain_table(gains),),
    )
