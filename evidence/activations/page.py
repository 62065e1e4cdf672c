"""The demo's page on the Activation Tap: what a diffusion model knows about a picture, from coarse to fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.activations.activation_pca import PCABasis, pca_rgb
from ...engine.activations.container import Activations
from ...engine.activations.tap import tap_latents
from ...engine.activations.tap_config import TapConfig
from ...engine.io.html_page import Report
from ...engine.runtime.progress import Progress, silent
from .drawing import to_pil
from .filter_page import add_filter
from .matching_page import add_matching
from .measures import part_agreement
from .world import TIMESTEP, draw_scene

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...engine.portraits import Portraits

PLACES = {
    "down-level0-repeat0-res-out": "down stage: still full of noise, dropped by the paper's filter",
    "mid-vit-out": "the middle: coarsest",
    "up-level0-repeat0-vit-block0-cross-q": "early up stage, cross-attention query",
    "up-level0-repeat1-vit-block0-out": "later in the same resolution: finer",
    "up-level0-upsampler-out": "the place earlier work used",
    "up-level1-repeat0-vit-block0-cross-q": "next resolution, cross-attention query",
    "up-level1-repeat1-vit-out": "the end of the network: over-refined, noise returns",
}
"""Addresses in execution order, with what the paper says about such a place (GDF, sections 4 and 5)."""

PEOPLE = (3, 14, 15, 92)
SEEDS = tuple(range(8))
_SIDE = 128


def section(report: Report, progress: Progress = silent, model: Portraits | None = None) -> None:
    """Write the section: four renders, and their activations at seven places in shared colours, each with a figure."""
    from ...engine.portraits import load_portraits

    shipped, model = model is None, model or load_portraits()
    scene = draw_scene(model, PEOPLE)
    config = TapConfig(tuple(PLACES), TIMESTEP, SEEDS)
    taps = tap_latents(scene.denoiser, scene.latents, scene.cond, config, progress, prompts=scene.captions)
    report.add_heading("Activation Tap: what the model sees in a picture")
    report.add_paragraph(
        f"Four portraits are noised to timestep 50 with {len(SEEDS)} seeds, sent once through the denoiser, and read "
        "at seven places. Each row shows the three principal components of one place as colours, fitted on "
        "all four pictures together: where hair has one colour in all of them, the model treats hair as one thing. "
        "The number is how often the nearest feature in another picture belongs to the same part of the face "
        "(foreground only, parts known from the renderer; all places at 16 x 16). In brackets, what the paper "
        "found at such places in large models."
    )
    report.add_images([(to_pil(i), text) for i, text in zip(scene.images, scene.captions, strict=True)], width=_SIDE)
    scores = {address: part_agreement(taps[address].tensor, scene.parts) for address in PLACES}
    for address, remark in PLACES.items():
        report.add_paragraph(f"{address} ({remark}): {scores[address]:.0%} of nearest features lie in the same part.")
        report.add_images([(p, address) for p in _rows(taps, address)], width=_SIDE)
    best = max(scores, key=scores.__getitem__)
    last = list(scores.values())[-1]
    report.add_paragraph(f"Best here: {best} with {scores[best]:.0%}; the last place reaches {last:.0%}.")
    if shipped:  # its places and figures belong to this model; a caller's own may lack them
        add_matching(report, model, progress)
        add_filter(report, model, progress)


def _rows(taps: Activations, address: str) -> list[Image]:
    return [to_pil(p) for p in pca_rgb(taps[address], PCABasis.fit(taps[address]), _SIDE)]
