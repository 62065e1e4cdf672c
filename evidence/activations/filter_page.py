"""The demo's page on the filter: a strip of colours for every place, kept or dropped, with its three figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...engine.activations.images import encode_pixels
from ...engine.activations.ranking import LOOKED_AT, Ranking, rank_places
from ...engine.charts import line_chart
from ...engine.progress import Progress, silent

if TYPE_CHECKING:
    from PIL import Image

    from ...engine.portraits import Portraits

_SHOWN, _SIDE, _FIRST = 4, 56, 7_700_000


def add_filter(report: Any, model: Portraits, progress: Progress = silent) -> None:
    """Score every place on 16 portraits, without labels, and show what is kept and why the rest is not."""
    from ...engine.condition import Condition
    from ...engine.denoiser import Denoiser
    from ...engine.portraits import caption, render, sample_scenes

    scenes = sample_scenes(range(_FIRST, _FIRST + LOOKED_AT))
    with torch.no_grad():
        cond = Condition(text=model.encode(caption(scenes)))
    latents = encode_pixels(model.vae, render(scenes).images * 2 - 1)
    denoiser = Denoiser.from_diffusers(model.pipeline())
    ranking = rank_places(denoiser, latents, cond, strips=True, progress=progress)
    report.add_heading("The filter: which places deserve a measurement")
    report.add_paragraph(
        f"Every place of the denoiser is scored on {LOOKED_AT} portraits, without labels: diffusion noise (what two "
        "noises do not share), granularity (cycles across the picture) and locality (do features only say where "
        f"they are). {len(ranking.kept)} of {len(ranking.properties)} places stay. Measured on other pictures, the "
        "five best places for keypoints and for parts are among them: `vitrine reproduce gdf.filter`."
    )
    noise = [(float(i), p.noise) for i, p in enumerate(ranking.properties.values())]
    report.add_images([(line_chart({"noise": noise}, "Diffusion noise along the network", "place", "score"), "")], 560)
    report.add_paragraph("Kept (noise, cycles, locality):")
    report.add_images([(_strip(ranking, a), _figures(ranking, a)) for a in ranking.kept], width=_SHOWN * _SIDE)
    report.add_paragraph("Dropped, and why:")
    rows = [(_strip(ranking, a), f"{_figures(ranking, a)}: {'; '.join(why)}") for a, why in ranking.dropped.items()]
    report.add_images(rows, width=_SHOWN * _SIDE)


def _figures(ranking: Ranking, address: str) -> str:
    p = ranking.properties[address]
    return f"{address} ({p.noise:.3f}, {p.granularity:.1f}, {p.locality:.2f})"


def _strip(ranking: Ranking, address: str) -> Image.Image:
    from PIL import Image

    strip = ranking.strip(address, _SIDE)[:, :, : _SHOWN * _SIDE]
    return Image.fromarray((strip * 255).round().byte().permute(1, 2, 0).numpy())
