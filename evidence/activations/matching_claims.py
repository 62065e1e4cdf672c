"""Claims about correspondence and segmentation on held-out portraits: ``vitrine reproduce 'gdf.*'``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.activations.correspondence import feature_maps, find_correspondence, pck
from ...engine.activations.greedy_search import Comparison, compare
from ...engine.activations.segmentation import (
    bootstrap_iou,
    bootstrap_iou_gain,
    bootstrap_mean,
    confusion,
    fit_probe,
    iou,
    mean_iou,
)
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim

PAPER = "GDF (arXiv 2410.03558)"
CHOOSING, TESTING, LABELLED = 7_100_000, 7_200_000, 7_300_000
TEST, HELD_OUT, SHOTS, SIDE, ALPHA = 200, 60, 20, 16, 0.1


@dataclass(frozen=True)
class Pictures:
    """Held-out renders with their truth, and taps of every candidate place at t = 50, four seeds."""

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor
    taps: Any

    def features(self, addresses: tuple[str, ...]) -> torch.Tensor:
        """(B, C, 16, 16); the word "pixels" stands for 4 x 4 patches of the picture."""
        if addresses == ("pixels",):
            patches = F.pixel_unshuffle(self.images, self.images.shape[-1] // SIDE)
            return F.normalize(patches - patches.mean((0, 2, 3), keepdim=True), dim=1)
        return feature_maps(self.taps.select(list(addresses)), (SIDE, SIDE))


def tap_pictures(portraits: Any, first: int, count: int, addresses: list[str], progress: Progress) -> Pictures:
    """Render and tap identities that training never saw."""
    from ...engine.activations.config import TapConfig
    from ...engine.activations.images import encode_pixels
    from ...engine.activations.tap import tap_latents
    from ...engine.condition import Condition
    from ...engine.denoiser import Denoiser
    from ...engine.portraits import caption, render, sample_scenes

    scenes = sample_scenes(range(first, first + count))
    drawn = render(scenes)
    with torch.no_grad():
        cond = Condition(text=portraits.encode(caption(scenes)))
    latents = encode_pixels(portraits.vae, drawn.images * 2 - 1)
    config = TapConfig(tuple(addresses), 50.0, (0, 1, 2, 3))
    taps = tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config, progress)
    return Pictures(drawn.images, drawn.parts.long(), drawn.keypoints, taps)


def candidates(portraits: Any) -> list[str]:
    """Every spatial place of the network but its input and output."""
    from ...engine.addresses import sites_of

    kinds = ("spatial", "tokens")
    return [a for a, s in sites_of(portraits.unet).items() if s.kind in kinds and a not in ("unet-in", "unet-out")]


def filtered(portraits: Any, progress: Progress) -> list[str]:
    """What the qualitative filter leaves, from the pictures that places are chosen on."""
    from ...engine.activations.filter import FilterRule
    from .filter_claims import properties_of

    return FilterRule().apply(properties_of(portraits, candidates(portraits), CHOOSING, progress))[0]


def correspondence_score(pictures: Pictures, features: torch.Tensor) -> tuple[float, torch.Tensor]:
    """PCK@0.1 of the picture's side, between each picture and the one half a set away."""
    count = len(features)
    found, true = [], []
    for i in range(count):
        j = (i + count // 2) % count
        seen = ~torch.isnan(pictures.keypoints[i]).any(1)
        found.append(
            find_correspondence(features[i], features[j], pictures.keypoints[i][seen], temperature=0.02).points
        )
        true.append(pictures.keypoints[j][seen])
    return pck(found, true, [1.0] * count, ALPHA)


def by_pair(each: torch.Tensor) -> torch.Tensor:
    """(B / 2,) from (B,): picture i to j and j to i are one pair, so that a bootstrap does not count it twice."""
    return each.view(2, -1).nanmean(0)


def _widths(taps: Any) -> dict[str, int]:
    return {a: v.tensor.shape[1] for a, v in taps.items()}


def _as_wide_as(legacy: tuple[str, ...], names: list[str], widths: dict[str, int], score: Any) -> Comparison:
    """The same search with no more channels than legacy has: more channels alone help a probe."""
    budget = sum(widths[a] for a in legacy)
    return compare(names, score, channels=widths, budget=budget, most=4, pool=len(names))


def _remember(score: Any) -> Any:
    """Both searches ask for the same singles."""
    known: dict[tuple[str, ...], float] = {}

    def asked(picked: tuple[str, ...]) -> float:
        key = tuple(sorted(picked))
        if key not in known:
            known[key] = score(picked)
        return known[key]

    return asked


@claim(
    "gdf.correspondence",
    paper=PAPER,
    figure="Table 1: better places beat the places used before (there SPair-71k; here keypoints of 200 portraits)",
    target="PCK@0.1 of the chosen places above legacy ones, outside the 95 % bootstrap interval of the difference",
)
def correspondence(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Raw pixels, legacy places, and places chosen by filter and comparison on held-out portraits, on 200 pairs."""
    from ...engine.activations.presets import PRESETS
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    names, legacy = filtered(portraits, progress), PRESETS["portraits-legacy"].addresses
    held_out = tap_pictures(portraits, CHOOSING, HELD_OUT, [*dict.fromkeys((*names, *legacy))], progress)
    score = _remember(lambda picked: correspondence_score(held_out, held_out.features(picked))[0])
    comparison = compare(names, score, most=3, pool=8, progress=progress)
    widths = _widths(held_out.taps)
    narrow = _as_wide_as(legacy, names, widths, score)
    wanted = [*dict.fromkeys((*comparison.chosen, *narrow.chosen, *legacy))]
    test = tap_pictures(portraits, TESTING, TEST, wanted, progress)
    rows = {name: correspondence_score(test, test.features(places)) for name, places in
            {"raw pixels": ("pixels",), "legacy": legacy, "chosen": comparison.chosen,
             "chosen, legacy's width": narrow.chosen}.items()}  # fmt: skip
    gain = bootstrap_mean(by_pair(rows["chosen"][1] - rows["legacy"][1]))
    same_width = bootstrap_mean(by_pair(rows["chosen, legacy's width"][1] - rows["legacy"][1]))
    return ClaimResult(
        value=round(rows["chosen"][0], 4),
        interval=tuple(round(v, 4) for v in bootstrap_mean(by_pair(rows["chosen"][1]))),  # type: ignore[arg-type]
        holds=gain[0] > 0,
        details={
            "PCK@0.1": {name: round(value, 4) for name, (value, _) in rows.items()},
            "gain over legacy, 95 %": [round(v, 4) for v in gain],
            "gain over legacy at its width, 95 %": [round(v, 4) for v in same_width],
            **_places(legacy, comparison, narrow, widths),
            "places after the filter": len(names),
            "best alone": dict(list({k: round(v, 3) for k, v in comparison.singles.items()}.items())[:5]),
        },
    )


def _places(
    legacy: tuple[str, ...], comparison: Comparison, narrow: Comparison, widths: dict[str, int]
) -> dict[str, Any]:
    """Which places stand behind the rows, and how many channels they have."""
    rows = {"legacy": legacy, "chosen": comparison.chosen, "chosen, legacy's width": narrow.chosen}
    return {
        "places": {name: list(picked) for name, picked in rows.items()},
        "channels": {name: sum(widths[a] for a in picked) for name, picked in rows.items()},
    }


@claim(
    "gdf.segmentation",
    paper=PAPER,
    figure="Table 2, few labels: better places beat the places used before (here parts of 200 portraits, 20 labelled)",
    target="mIoU of the chosen places above legacy ones, bootstrap intervals apart (chosen may have more channels)",
)
def segmentation(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """A linear probe on 20 labelled portraits, tested on 200 others."""
    from ...engine.activations.presets import PRESETS
    from ...engine.portraits import PARTS, load_portraits

    portraits, classes = load_portraits(model), len(PARTS)

    def tables(train: Pictures, test: Pictures, picked: tuple[str, ...]) -> torch.Tensor:
        probe = fit_probe(train.features(picked), train.parts, classes)
        predicted = probe.predict(test.features(picked), (64, 64))
        return confusion(predicted, test.parts, classes)

    names, legacy = filtered(portraits, progress), PRESETS["portraits-legacy"].addresses
    half = tap_pictures(portraits, CHOOSING, HELD_OUT, [*dict.fromkeys((*names, *legacy))], progress)

    def part(pictures: Pictures, rows: slice) -> Pictures:
        items = {a: v for a, v in pictures.taps.items()}
        cut = type(pictures.taps)({a: type(v)(a, v.tensor[rows], v.grid) for a, v in items.items()}, pictures.taps.info)
        return Pictures(pictures.images[rows], pictures.parts[rows], pictures.keypoints[rows], cut)

    fit_on, judge_on = part(half, slice(0, SHOTS)), part(half, slice(SHOTS, None))

    def alone(picked: tuple[str, ...]) -> float:
        probe = fit_probe(fit_on.features(picked), fit_on.parts, classes)
        return mean_iou(probe.predict(judge_on.features(picked), (64, 64)), judge_on.parts, classes)[0]

    score = _remember(alone)
    comparison = compare(names, score, most=3, pool=6, progress=progress)
    widths = _widths(half.taps)
    narrow = _as_wide_as(legacy, names, widths, score)
    wanted = [*dict.fromkeys((*comparison.chosen, *narrow.chosen, *legacy))]
    train = tap_pictures(portraits, LABELLED, SHOTS, wanted, progress)
    test = tap_pictures(portraits, TESTING, TEST, wanted, progress)
    places = {"raw pixels": ("pixels",), "legacy": legacy, "chosen": comparison.chosen,
              "chosen, legacy's width": narrow.chosen}  # fmt: skip
    found = {name: tables(train, test, picked) for name, picked in places.items()}
    values = {name: iou(table.sum(0))[0] for name, table in found.items()}
    spans = {name: bootstrap_iou(table) for name, table in found.items()}
    return ClaimResult(
        value=round(values["chosen"], 4),
        interval=(round(spans["chosen"][0], 4), round(spans["chosen"][1], 4)),
        holds=spans["chosen"][0] > spans["legacy"][1],
        details={
            "mIoU": {name: round(v, 4) for name, v in values.items()},
            "95 %": {name: [round(v, 4) for v in span] for name, span in spans.items()},
            "gain over legacy, 95 %": [round(v, 4) for v in bootstrap_iou_gain(found["chosen"], found["legacy"])],
            "gain over legacy at its width, 95 %": [
                round(v, 4) for v in bootstrap_iou_gain(found["chosen, legacy's width"], found["legacy"])
            ],
            **_places(legacy, comparison, narrow, widths),
            "places after the filter": len(names),
            "best alone": dict(list({k: round(v, 3) for k, v in comparison.singles.items()}.items())[:5]),
        },
    )
