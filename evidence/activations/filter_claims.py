"""Claims about the filter and the three properties it scores: ``vitrine reproduce gdf.filter gdf.properties``."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from ...engine.activations.filter import FilterRule, Properties, measure_properties
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim

PAPER = "GDF (arXiv 2410.03558)"
LOOKED_AT, FILTERING, PROBING = 16, 7_700_000, 7_710_000
"""Identities that neither training nor the choice of the rule saw."""


def properties_of(portraits: Any, names: list[str], first: int, progress: Progress = silent) -> dict[str, Properties]:
    """The three scores of every place from 16 held-out renders."""
    from ...engine.activations.images import encode_pixels
    from ...engine.condition import Condition
    from ...engine.denoiser import Denoiser
    from ...engine.portraits import caption, render, sample_scenes

    scenes = sample_scenes(range(first, first + LOOKED_AT))
    with torch.no_grad():
        cond = Condition(text=portraits.encode(caption(scenes)))
    latents = encode_pixels(portraits.vae, render(scenes).images * 2 - 1)
    return measure_properties(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, names, progress=progress)


@claim(
    "gdf.filter",
    paper=PAPER,
    figure="Section 5.1: the filter spares most measurements (SDXL: 63 of 279 places stay)",
    target="every place of the exhaustive top 5 stays, for keypoints and for parts; >= 60 % of places are dropped",
)
def filtering(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Scores from 16 pictures without labels; then all places are measured on 60 others."""
    from ...engine.activations.segmentation import fit_probe, mean_iou
    from ...engine.portraits import PARTS, load_portraits
    from .matching_claims import SHOTS, candidates, correspondence_score, tap_pictures

    portraits, classes = load_portraits(model), len(PARTS)
    names = candidates(portraits)
    kept, dropped = FilterRule().apply(properties_of(portraits, names, FILTERING, progress))
    pictures = tap_pictures(portraits, PROBING, 60, names, progress)
    keypoints, parts = {}, {}
    for address in names:
        features = pictures.features((address,))
        keypoints[address] = correspondence_score(pictures, features)[0]
        probe = fit_probe(features[:SHOTS], pictures.parts[:SHOTS], classes)
        parts[address] = mean_iou(probe.predict(features[SHOTS:], (64, 64)), pictures.parts[SHOTS:], classes)[0]
    tasks = {"keypoints, PCK@0.1": keypoints, "parts, mIoU": parts}
    top = {name: sorted(table, key=table.__getitem__, reverse=True)[:5] for name, table in tasks.items()}
    lost = sorted({a for best in top.values() for a in best if a in dropped})
    share = len(dropped) / len(names)
    return ClaimResult(
        value=round(share, 4),
        interval=None,
        holds=not lost and share >= 0.6,
        details={
            "places": len(names), "kept": len(kept), "top 5 that were dropped": lost,
            "top 5": {name: {a: round(tasks[name][a], 3) for a in best} for name, best in top.items()},
            "median PCK@0.1 [kept, dropped]": [round(median(keypoints[a] for a in p), 3) for p in (kept, dropped)],
            "median mIoU [kept, dropped]": [round(median(parts[a] for a in p), 3) for p in (kept, dropped)],
            "dropped": {a: "; ".join(why) for a, why in dropped.items()},
        },
    )  # fmt: skip


NOISE_ORDER = {"start of down": "down-level0-repeat0-res-out", "early up": "up-level0-repeat0-vit-block0-cross-q",
               "end of up": "up-level1-repeat1-vit-out"}  # fmt: skip
_VITS = ("up-level0-repeat0", "up-level0-repeat1", "up-level1-repeat0")


@claim(
    "gdf.properties",
    paper=PAPER,
    figure="Figure 3: diffusion noise along the network, granularity inside a resolution, locality of self-attention",
    target="noise high, low, high along the network; levels finer and finer; self-attention q and k more local than "
    "cross-attention q and block outputs in two of three transformers",
)
def properties(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The three scores where the paper looks, and where this small model differs."""
    from ...engine.portraits import load_portraits
    from .matching_claims import candidates

    portraits = load_portraits(model)
    table = properties_of(portraits, candidates(portraits), FILTERING, progress)
    noise = {name: round(table[a].noise, 4) for name, a in NOISE_ORDER.items()}
    asymmetric = min(noise["start of down"], noise["end of up"]) > 1.5 * noise["early up"]
    inside = {level: {a.removeprefix(f"{level}-"): round(table[a].granularity, 2) for a in table
                      if a.startswith(level) and a.endswith(("res-out", "block0-out", "vit-out", "upsampler-out"))}
              for level in ("up-level0", "up-level1")}  # fmt: skip
    finer = median(inside["up-level1"].values()) > median(inside["up-level0"].values())
    local = {}
    for vit in _VITS:
        places = {n: f"{vit}-vit-block0-{n}" for n in ("self-q", "self-k", "cross-q", "out")}
        local[vit] = {n: round(table[a].locality, 3) for n, a in places.items()}
    bound = [min(v["self-q"], v["self-k"]) > max(v["cross-q"], v["out"]) for v in local.values()]
    series = list(inside["up-level0"].values())
    return ClaimResult(
        value=round(noise["start of down"] / noise["early up"], 2),
        interval=None,
        holds=asymmetric and finer and sum(bound) >= 2,
        details={
            "noise": noise,
            "granularity, cycles": inside,
            "finer inside the first up level, as in the paper": series[-1] > series[0],
            "locality": local,
            "self-attention more local than cross-attention and output, by transformer": dict(
                zip(_VITS, bound, strict=True)
            ),
        },
    )
