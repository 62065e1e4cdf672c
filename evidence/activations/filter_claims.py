"""Claims about the filter and its three properties: ``vitrine reproduce 'gdf.filter*' gdf.properties``."""

from __future__ import annotations

import math
from statistics import median

from ...engine.activations.qualitative_filter import Properties, filtered
from ...engine.activations.ranking import PICTURES_SCORED
from ...engine.activations.segmentation import ProbeSettings, fit_probe, mean_iou
from ...engine.portraits import PARTS
from ...engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.ranking_options import FilterRule
from ..registry import ClaimResult, Table, arms, claim
from .measures import correspondence_score
from .tapped_pictures import (
    FILTERING,
    PAPER,
    PROBING,
    SHOTS,
    Model,
    Pictures,
    all_sites,
    score_sites,
    tap_pictures,
)

PROBED_COUNT, QUICK_PROBED_COUNT = 60, 36
QUICK_SCORED_COUNT = 8
QUICK_PIXELS = 256
TOP_COUNT, QUICK_TOP_COUNT = 5, 3
"""With fewer images, fewer of the best sites can be distinguished."""


@claim(
    "gdf.filter",
    paper=PAPER,
    figure="Section 5.1: the filter saves most measurements (SDXL: 63 of 279 layers stay)",
    target="each layer of the exhaustive top 5 stays, for keypoints and for parts; >= 60 % of layers are dropped; a "
    "random rule that keeps as many would do so less than one time in twenty",
    minutes=0.7,
    quick_minutes=0.5,
)
def filtering(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Filter scores from 16 images without labels, compared with all sites measured on 60 others."""
    from ...engine.portraits import load_portraits

    return judge_filter(load_portraits(model), progress, quick)


@claim(
    "gdf.filter.flow",
    paper=PAPER,
    figure="gdf.filter on the flow model, with the rule and the timestep unchanged",
    target="each layer of the exhaustive top 5 stays, for keypoints and for parts; >= 60 % of layers are dropped; a "
    "random rule that keeps as many would do so less than one time in twenty",
    minutes=2,
    quick_minutes=0.3,
)
def filtering_flow(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.filter: scores from 16 images without labels, compared with all sites measured on 60 others."""
    return judge_filter(load_flow_portraits(model or FLOW_WEIGHTS), progress, quick)


def judge_filter(portraits: Model, progress: Progress, quick: bool) -> ClaimResult:
    """The filter's choice compared with the exhaustive measurement of all sites."""
    sites, count = all_sites(portraits), QUICK_PROBED_COUNT if quick else PROBED_COUNT
    candidates, dropped = filtered(FilterRule(), score_sites(portraits, FILTERING, progress))
    pictures = tap_pictures(portraits, PROBING, count, sites, progress, misaligned=True)
    tasks = _measure_all(pictures, sites, ProbeSettings(pixels=QUICK_PIXELS) if quick else ProbeSettings())
    count = QUICK_TOP_COUNT if quick else TOP_COUNT
    top = {name: sorted(scores, key=scores.__getitem__, reverse=True)[:count] for name, scores in tasks.items()}
    lost = sorted({a for best in top.values() for a in best if a in dropped})
    fraction = len(dropped) / len(sites)
    best = {a for group in top.values() for a in group}
    luck = random_rule_keeps(len(sites), len(candidates), len(best))
    keypoints, parts = tasks.values()
    return ClaimResult(
        value=round(fraction, 4),
        interval=None,
        holds=not lost and fraction >= 0.6 and luck < 0.05,
        details={
            "places": len(sites),
            "kept": len(candidates),
            f"top {count} that were dropped": lost,
            "best places, a random rule of this size keeps them all": [len(best), round(luck, 6)],
            "of them a random rule keeps on average": round(len(best) * len(candidates) / len(sites), 2),
            f"top {count}": {name: {a: round(tasks[name][a], 3) for a in best} for name, best in top.items()},
            "median PCK@0.1 [kept, dropped]": [_median(keypoints, group) for group in (candidates, dropped)],
            "median mIoU [kept, dropped]": [_median(parts, group) for group in (candidates, dropped)],
            "dropped": {a: "; ".join(reasons) for a, reasons in dropped.items()},
        },
        n=len(sites),
        parts={"every one of the best stays": not lost and luck < 0.05},
        tables=(
            Table(
                f"Of the {len(best)} best layers",
                ("rule", "kept"),
                (
                    ("filter", len(best) - len(lost)),
                    ("random rule of its size, on average", len(best) * len(candidates) / len(sites)),
                ),
            ),
            Table(
                "Medians of kept and dropped layers",
                ("score", "kept", "dropped"),
                tuple((name, _median(each, candidates), _median(each, dropped)) for name, each in tasks.items()),
            ),
        ),
    )


def random_rule_keeps(sites: int, kept: int, best: int) -> float:
    """Probability that ``best`` sites are all among ``kept`` random ones of ``sites`` (hypergeometric)."""
    return math.comb(sites - best, kept - best) / math.comb(sites, kept) if kept >= best else 0.0


def _measure_all(pictures: Pictures, sites: list[str], settings: ProbeSettings) -> dict[str, dict[str, float]]:
    """Task -> site -> score: keypoints among all images, parts by a probe fitted on the first twenty."""
    keypoints, parts = {}, {}
    for address in sites:
        features = pictures.features((address,))
        keypoints[address] = correspondence_score(pictures, features)[0]
        probe = fit_probe(features[:SHOTS], pictures.parts[:SHOTS], len(PARTS), settings)
        predicted = probe.predict(features[SHOTS:], (pictures.parts.shape[-2], pictures.parts.shape[-1]))
        parts[address] = mean_iou(predicted, pictures.parts[SHOTS:], len(PARTS))[0]
    return {"keypoints, PCK@0.1": keypoints, "parts, mIoU": parts}


def _median(scores: dict[str, float], sites: list[str] | dict[str, list[str]]) -> float:
    return round(median(scores[a] for a in sites), 3)


NOISE_ORDER = {
    "start of down": "down-level0-repeat0-res-out",
    "early up": "up-level0-repeat0-vit-block0-cross-q",
    "end of up": "up-level1-repeat1-vit-out",
}
_LEVELS = ("up-level0", "up-level1")
_INSIDE = ("res-out", "block0-out", "vit-out", "upsampler-out")
_VITS = ("up-level0-repeat0", "up-level0-repeat1", "up-level1-repeat0")


@claim(
    "gdf.properties",
    paper=PAPER,
    figure="Figure 3: diffusion noise along the network, granularity inside a resolution, locality of self-attention",
    target="noise high, low, high along the network; levels finer and finer; self-attention q and k more local than "
    "cross-attention q and block outputs in two of three transformers",
    minutes=0.1,
    quick_minutes=0.05,
)
def properties(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The three scores at the paper's layers, and where this small model differs."""
    from ...engine.portraits import load_portraits

    scores = score_sites(load_portraits(model), FILTERING, progress, QUICK_SCORED_COUNT if quick else PICTURES_SCORED)
    noise = {name: round(scores[a].noise, 4) for name, a in NOISE_ORDER.items()}
    asymmetric = min(noise["start of down"], noise["end of up"]) > 1.5 * noise["early up"]
    granularity = {level: _granularity(scores, level) for level in _LEVELS}
    low, high = (list(granularity[level].values()) for level in _LEVELS)
    locality = {vit: _locality(scores, vit) for vit in _VITS}
    local = {vit: min(v["self-q"], v["self-k"]) > max(v["cross-q"], v["out"]) for vit, v in locality.items()}
    return ClaimResult(
        value=round(noise["start of down"] / noise["early up"], 2),
        interval=None,
        holds=asymmetric and median(high) > median(low) and sum(local.values()) >= 2,
        details={
            "noise": noise,
            "granularity, cycles": granularity,
            "finer inside the first up level, as in the paper": low[-1] > low[0],
            "locality": locality,
            "self-attention more local than cross-attention and output, by transformer": local,
        },
        arms=arms(noise, {"start of down": "ours", "early up": "reference", "end of up": "reference"}),
        n=QUICK_SCORED_COUNT if quick else PICTURES_SCORED,
        parts={
            "noise high, low, high": asymmetric,
            "levels finer and finer": median(high) > median(low),
            "self-attention more local": sum(local.values()) >= 2,
        },
    )


def _granularity(scores: dict[str, Properties], level: str) -> dict[str, float]:
    """Granularity of the outputs within one resolution, in execution order."""
    inside = [a for a in scores if a.startswith(level) and a.endswith(_INSIDE)]
    return {a.removeprefix(f"{level}-"): round(scores[a].granularity, 2) for a in inside}


def _locality(scores: dict[str, Properties], vit: str) -> dict[str, float]:
    names = ("self-q", "self-k", "cross-q", "out")
    return {name: round(scores[f"{vit}-vit-block0-{name}"].locality, 3) for name in names}
