"""Chosen sites and the filter on the flow model: ``vitrine reproduce 'gdf.*.flow'``."""

from __future__ import annotations

from ...engine.activations.segmentation import ProbeSettings
from ...engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, claim
from .filter_claims import judge_filter
from .matching_claims import QUICK_PIXELS, choose_sites, measure_parts, measure_points, score_parts, score_points
from .tapped_pictures import PAPER, TIMESTEP

HELD_OUT, TEST = 120, 200
HELD_OUT_PARTS = 60
QUICK_HELD_OUT, QUICK_TEST = 40, 60
PRIOR = ("vit-block3-in",)
"""DiTF's layer in Flux, the 29th of 57 blocks, mapped to six blocks."""
DITF = (("prior work's layer, modulated (DiTF)", PRIOR, {"modulate": True}),)
TIMESTEPS, QUICK_TIMESTEPS = (50.0, 260.0), (260.0,)
"""GDF's and DiTF's timesteps; the better one is chosen on other portraits than those of the test."""


@claim(
    "gdf.correspondence.flow",
    paper=PAPER,
    figure="gdf.correspondence on the flow model: keypoints of 200 misaligned portraits of 128 px",
    target="PCK@0.1 of the chosen layers above copied coordinates and above the same search over blocks' inputs and "
    "outputs, outside the 95 % bootstrap interval of each difference",
    minutes=2,
    quick_minutes=0.25,
)
def correspondence(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.correspondence, with the same filter rule; the prior-work layer is DiTF's, raw and modulated."""
    portraits = load_flow_portraits(model or FLOW_WEIGHTS)
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    choices = [
        choose_sites(portraits, held_out, score_points, 8, progress, timestep=t, prior=PRIOR)
        for t in (QUICK_TIMESTEPS if quick else TIMESTEPS)
    ]
    choice = max(choices, key=lambda c: c.search.score)
    result = measure_points(portraits, choice, tested, progress, DITF)
    result.details["timestep"] = choice.timestep
    result.details["by timestep, where it was chosen"] = {c.timestep: round(c.search.score, 4) for c in choices}
    return result


@claim(
    "gdf.segmentation.flow",
    paper=PAPER,
    figure="gdf.segmentation on the flow model: parts of 200 misaligned portraits of 128 px, 20 labelled",
    target="mIoU of the chosen layers above Fourier coordinates and above the same search over blocks' inputs and "
    "outputs, outside the 95 % bootstrap interval of each difference",
    minutes=4,
    quick_minutes=0.7,
)
def segmentation(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.segmentation, with the same filter rule; the prior-work layer is DiTF's, raw and modulated."""
    portraits = load_flow_portraits(model or FLOW_WEIGHTS)
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT_PARTS, TEST)
    settings = ProbeSettings(pixels=QUICK_PIXELS) if quick else None  # of the search; its choice is tested in full
    choices = [
        choose_sites(
            portraits, held_out, lambda p, a: score_parts(p, a, settings), 6, progress, timestep=t, prior=PRIOR
        )
        for t in (QUICK_TIMESTEPS if quick else TIMESTEPS)
    ]
    choice = max(choices, key=lambda c: c.search.score)
    result = measure_parts(portraits, choice, tested, progress, DITF)
    result.details["timestep"] = choice.timestep
    result.details["by timestep, where it was chosen"] = {c.timestep: round(c.search.score, 4) for c in choices}
    return result


@claim(
    "gdf.filter.flow",
    paper=PAPER,
    figure="gdf.filter on the flow model, with the rule and the timestep unchanged",
    target="each layer of the exhaustive top 5 stays, for keypoints and for parts; >= 60 % of layers are dropped; a "
    "random rule that keeps as many would do so less than one time in twenty",
    minutes=2,
    quick_minutes=0.3,
)
def filtering(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.filter: scores from 16 images without labels, compared with all sites measured on 60 others."""
    return judge_filter(load_flow_portraits(model or FLOW_WEIGHTS), progress, quick, TIMESTEP)
