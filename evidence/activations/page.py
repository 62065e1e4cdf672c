"""The demo's section on activations: what layers encode about an image, and which of them the filter keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.activations.activation_pictures import PCABasis, pca_rgb
from ...engine.activations.container import Activations
from ...engine.activations.ranked_pictures import Pictures as Ranked
from ...engine.activations.ranking import PICTURES_SCORED, RankingConfig, rank_sites
from ...engine.runtime.progress import Progress, silent
from ..charts import line_chart
from .measures import part_agreement_by_picture
from .tapped_pictures import FILTERING, Pictures, draw_scene, tap_pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...engine.io.html_page import Report
    from ...engine.portraits import Portraits

SITES = {
    "down-level0-repeat0-res-out": "down stage, first",
    "mid-vit-out": "the middle, coarsest",
    "up-level0-repeat0-vit-block0-cross-q": "early up stage, cross-attention query",
    "up-level0-repeat1-vit-block0-out": "the same resolution, later",
    "up-level0-upsampler-out": "between modules: what earlier work used",
    "up-level1-repeat0-vit-block0-cross-q": "next resolution, cross-attention query",
    "up-level1-repeat1-vit-out": "the end of the network",
}
"""Layers in execution order."""
FIRST_SCENE, SHOWN, MEASURED, SEEDS, _SIDE = 7_400_000, 4, 24, 4, 128


def section(report: Report, progress: Progress = silent, model: Portraits | None = None) -> None:
    """Misaligned renders, their activations at seven layers in shared colours, and the filter's choice."""
    from ...engine.portraits import load_portraits

    model = model or load_portraits()
    pictures = tap_pictures(model, FIRST_SCENE, MEASURED, list(SITES), progress, SEEDS, misaligned=True)
    report.add_subheading("Seven layers of one forward")
    report.add_paragraph(
        f"Portraits that are cropped, shifted, rotated and mirrored are noised to timestep 50 ({SEEDS} seeds) and sent "
        "through the denoiser once. Colours: the three principal components of a layer, fitted on all pictures "
        "together, so the model treats what has one colour as alike. Above them, the pictures."
    )
    report.add_images([(to_pil(image), "input") for image in pictures.images[:SHOWN]], width=_SIDE)
    for place, where in SITES.items():
        report.add_images([(image, f"{where}: {place}") for image in _colours(pictures.taps, place)], width=_SIDE)
    kept = _filter(report, model, progress)
    report.add_subheading("How much a layer knows about the parts of a face")
    report.add_paragraph(
        f"How often the nearest feature in another picture lies on the same part, {MEASURED} misaligned portraits, "
        "all layers at 16 x 16. The last two know nothing of faces."
    )
    rows = [(p, where, _agreement(pictures, p), "kept" if p in kept else "dropped") for p, where in SITES.items()]
    rows += [
        ("-", "copied coordinates", _agreement(pictures, None), "-"),
        ("-", "raw pixels", _agreement(pictures, "pixels"), "-"),
    ]
    report.add_table([("layer", "where", "same part", "filter"), *rows])


def _agreement(pictures: Pictures, place: str | None) -> str:
    features = None if place is None else pictures.features((place,))
    return f"{part_agreement_by_picture(features, pictures.parts).mean().item():.1%}"


def _colours(taps: Activations, place: str) -> list[Image]:
    return [to_pil(p) for p in pca_rgb(taps[place], PCABasis.fit(taps[place]), _SIDE)[:SHOWN]]


def _filter(report: Report, model: Portraits, progress: Progress) -> list[str]:
    """Noise along the network, and the layers that are kept."""
    scene = draw_scene(model, range(FILTERING, FILTERING + PICTURES_SCORED))
    ranking = rank_sites(scene.denoiser, Ranked.of(scene.latents, scene.cond), RankingConfig(), progress=progress)
    report.add_subheading("Which layers deserve a measurement")
    report.add_paragraph(
        f"Without labels, the filter scores every layer on {PICTURES_SCORED} portraits: diffusion noise (what two "
        "noises do not share), granularity and locality. It keeps "
        f"{len(ranking.kept)} of {len(ranking.properties)}. Below: noise along the network, input at the left."
    )
    noise = [(float(i), p.noise) for i, p in enumerate(ranking.properties.values())]
    chart = line_chart({"noise": noise}, "Diffusion noise along the network", "layer, in execution order", "score")
    report.add_images([(chart, "")], 560)
    return list(ranking.kept)


def to_pil(image: torch.Tensor) -> Image:
    """An image (3, H, W) in [0, 1], rounded to bytes."""
    from PIL import Image

    return Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())
