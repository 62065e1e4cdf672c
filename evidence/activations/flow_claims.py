"""Chosen places on the flow model: ``vitrine reproduce gdf.correspondence.flow``."""

from __future__ import annotations

from ...engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .matching_claims import choose_places, measure_points, score_points
from .world import PAPER

HELD_OUT, TEST = 120, 200
QUICK_HELD_OUT, QUICK_TEST = 40, 60
LEGACY = ("vit-block3-in",)
"""DiTF's place in Flux, the 29th of 57 blocks, carried over to six."""
TIMESTEPS, QUICK_TIMESTEPS = (50.0, 260.0), (260.0,)
"""GDF's and DiTF's; which one is better is chosen on other portraits than those that measure."""


@claim(
    "gdf.correspondence.flow",
    paper=PAPER,
    figure="gdf.correspondence on the flow model: keypoints of 200 misaligned portraits of 128 px",
    target="PCK@0.1 of the chosen places above copied coordinates and above the same search over blocks' inputs and "
    "outputs, outside the 95 % bootstrap interval of each difference",
    minutes=2,
    quick_minutes=0.5,
)
def correspondence(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As gdf.correspondence, with the filter's rule unchanged; legacy is DiTF's place, raw and with its remedy."""
    portraits = load_flow_portraits(model or FLOW_WEIGHTS)
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    choices = [
        choose_places(portraits, held_out, score_points, 8, progress, timestep=t, legacy=LEGACY)
        for t in (QUICK_TIMESTEPS if quick else TIMESTEPS)
    ]
    choice = max(choices, key=lambda c: c.search.score)
    extra = [("legacy, modulated (DiTF)", LEGACY, {"modulate": True})]
    result = measure_points(portraits, choice, tested, progress, extra)
    result.details["timestep"] = choice.timestep
    result.details["by timestep, where it was chosen"] = {c.timestep: round(c.search.score, 4) for c in choices}
    return result
