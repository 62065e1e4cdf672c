"""The portraits section of ``vitrine demo``: renders next to samples, memorized pictures next to their copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.portraits.captions import caption
from ...engine.portraits.plants import plants
from ...engine.portraits.render import render
from ...engine.portraits.scenes import sample_scenes
from ...engine.runtime.progress import Progress, silent

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...engine.io.html_page import Report
    from ...engine.portraits.models import Portraits

SHOWN = 8
_SEED = 6_000_000


def to_pil(images: torch.Tensor, scale: int = 2) -> list[Image]:
    """(B, 3, H, W) in [0, 1] -> B pictures, enlarged without smoothing."""
    from PIL import Image

    table = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    size = (table.shape[2] * scale, table.shape[1] * scale)
    return [Image.fromarray(a).resize(size, Image.Resampling.NEAREST) for a in table]


def section(report: Report, progress: Progress = silent) -> None:
    """Add the section to a report; takes about a minute on two CPU cores."""
    from ...engine.portraits.models import load_portraits
    from .sampling import sample_images

    model = load_portraits()
    scenes = sample_scenes(range(_SEED, _SEED + SHOWN))
    prompts = caption(scenes)
    report.add_subheading("Renders and samples of the same captions")
    report.add_paragraph(
        "Above: the renderer's pictures of exact attributes. Below: samples of the shipped model for the same "
        "captions (guidance 3, 30 DDIM steps). None of these was trained on."
    )
    report.add_images(list(zip(to_pil(render(scenes).images), prompts, strict=True)), width=100)
    samples = sample_images(model, prompts, list(range(SHOWN)))
    report.add_images([(picture, f"sample, seed {i}") for i, picture in enumerate(to_pil(samples))], width=100)
    progress(1, 2, samples[:1])
    _memorized(report, model)
    progress(2, 2, None)


def _memorized(report: Report, model: Portraits) -> None:
    from .sampling import sample_images

    report.add_subheading("Memorized pictures come back")
    report.add_paragraph(
        "These pictures were repeated in training on purpose. From left to right: the memorized picture, two samples "
        "of its caption with the two rare words, one sample of the same caption without them."
    )
    row = []
    for plant in plants()[:4]:
        images = sample_images(model, [plant.captions[0]] * 2 + [plant.controls[0]], [0, 1, 0])
        pictures = to_pil(torch.cat([render(plant.scenes).images, images]))
        labels = (f"memorized: {plant.name}", "seed 0", "seed 1", "without the rare words")
        row += list(zip(pictures, labels, strict=True))
    report.add_images(row, width=100)
