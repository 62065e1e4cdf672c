"""The demo's page on the Activation Tap: what a diffusion model knows about a picture, from coarse to fine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...engine.activations.config import TapConfig
from ...engine.activations.container import Activations
from ...engine.activations.images import encode_pixels
from ...engine.activations.pca import PCABasis, pca_rgb
from ...engine.activations.tap import tap_latents
from ...engine.progress import Progress, silent
from .filter_page import add_filter
from .matching_page import add_matching

if TYPE_CHECKING:
    from PIL import Image

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
"""Addresses in execution order, with what the paper says of such a place (GDF sections 4 and 5)."""

PEOPLE = (3, 14, 15, 92)
SEEDS = tuple(range(8))
_SIDE = 128
_GRID = (16, 16)
_OTHERS = 6


def section(report: Any, progress: Progress = silent, model: Portraits | None = None) -> None:
    """Write the section: four renders, their activations at seven places in shared colours, a measured number each."""
    from ...engine.condition import Condition
    from ...engine.denoiser import Denoiser
    from ...engine.portraits import caption, load_portraits, render, sample_scenes

    shipped = model is None
    model, scenes = model or load_portraits(), sample_scenes(list(PEOPLE))
    pictures, words = render(scenes), caption(scenes)
    with torch.no_grad():
        cond = Condition(text=model.encode(words))
    latents = encode_pixels(model.vae, pictures.images * 2 - 1)
    config = TapConfig(tuple(PLACES), timestep=50, seeds=SEEDS)
    taps = tap_latents(Denoiser.from_diffusers(model.pipeline()), latents, cond, config, progress, prompts=words)
    report.add_heading("Activation Tap: what the model sees in a picture")
    report.add_paragraph(
        f"Four portraits are noised to timestep 50 with {len(SEEDS)} seeds, sent once through the denoiser, and read "
        "at seven places. Each row shows the three principal components of one place as colours, fitted on "
        "all four pictures together: where hair has one colour in all of them, the model treats hair as one thing. "
        "The number is how often the nearest feature in another picture belongs to the same part of the face "
        "(foreground only, parts known from the renderer; all places at 16 x 16). In brackets, what the paper "
        "found at such places in large models."
    )
    report.add_images([(_pil(image), word) for image, word in zip(pictures.images, words, strict=True)], width=_SIDE)
    scores = {address: part_agreement(taps[address].tensor, pictures.parts) for address in PLACES}
    for address, why in PLACES.items():
        report.add_paragraph(f"{address} ({why}): {scores[address]:.0%} of nearest features lie in the same part.")
        report.add_images([(p, address) for p in _rows(taps, address)], width=_SIDE)
    best = max(scores, key=scores.__getitem__)
    last = list(scores.values())[-1]
    report.add_paragraph(f"Best here: {best} with {scores[best]:.0%}; the last place reaches {last:.0%}.")
    if shipped:  # its places and figures belong to this model; a caller's own may lack them
        add_matching(report, model, progress)
        add_filter(report, model, progress)


def part_agreement(maps: torch.Tensor, parts: torch.Tensor) -> float:
    """Share of foreground positions whose nearest feature (cosine) in other pictures has the same part label.

    Args:
        maps: (B, C, h, w) activations of B >= 2 pictures, resized to 16 x 16 so that all places face the same task.
        parts: (B, H, W) part indices, 0 is the background.

    Returns:
        Mean over pictures, in [0, 1].
    """
    return part_agreement_by_picture(maps, parts).mean().item()


def part_agreement_by_picture(maps: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """(B,) as :func:`part_agreement`: each picture searched in the six that follow it in a ring."""
    labels = _labels(parts, _GRID)
    maps = F.interpolate(maps.float(), size=_GRID, mode="bilinear", align_corners=False)
    features = F.normalize(maps.flatten(2) - maps.mean((0, 2, 3))[:, None], dim=1)
    scores = []
    for i in range(len(maps)):
        shown = labels[i] > 0
        others = [(i + step) % len(maps) for step in range(1, min(_OTHERS, len(maps) - 1) + 1)]
        nearest = [(features[i].T @ features[j]).argmax(1) for j in others]
        hits = [labels[j][n][shown] == labels[i][shown] for j, n in zip(others, nearest, strict=True)]
        scores.append(torch.stack(hits).float().mean())
    return torch.stack(scores)


def _labels(parts: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """(B, h*w): the part that covers most of each cell."""
    one_hot = F.one_hot(parts.long()).movedim(-1, 1).float()
    return F.adaptive_avg_pool2d(one_hot, grid).argmax(1).flatten(1)


def _rows(taps: Activations, address: str) -> list[Image.Image]:
    return [_pil(p) for p in pca_rgb(taps[address], PCABasis.fit(taps[address]), _SIDE)]


def _pil(image: torch.Tensor) -> Image.Image:
    from PIL import Image

    return Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())
