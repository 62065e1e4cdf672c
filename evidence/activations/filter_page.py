"""The demo's page on the filter: a strip of colours for every place, kept or dropped, with its three figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.activations.ranked_pictures import Pictures
from ...engine.activations.ranking import PICTURES_SCORED, Ranking, RankingConfig, rank_places
from ...engine.io.html_page import Report
from ...engine.runtime.progress import Progress, silent
from ..charts import line_chart
from .drawing import to_pil
from .world import FILTERING, draw_scene

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...engine.portraits import Portraits

_SHOWN, _SIDE = 4, 56


def add_filter(report: Report, model: Portraits, progress: Progress = silent) -> None:
    """Score every place on 16 portraits, without labels, and show what is kept and why the others are not."""
    scene = draw_scene(model, range(FILTERING, FILTERING + PICTURES_SCORED))
    config = RankingConfig(strips=True)
    ranking = rank_places(scene.denoiser, Pictures.of(scene.latents, scene.cond), config, progress=progress)
    report.add_heading("The filter: which places deserve a measurement")
    report.add_paragraph(
        f"Every place of the denoiser is scored on {PICTURES_SCORED} portraits, without labels: diffusion noise (what "
        "two noises do not share), granularity (cycles across the picture) and locality (do features only say where "
        f"they are). {len(ranking.kept)} of {len(ranking.properties)} places stay. Measured on other pictures, the "
        "five best places for keypoints and for parts are among them: `vitrine reproduce gdf.filter`."
    )
    noise = [(float(i), p.noise) for i, p in enumerate(ranking.properties.values())]
    report.add_images([(line_chart({"noise": noise}, "Diffusion noise along the network", "place", "score"), "")], 560)
    report.add_paragraph("Kept (noise, cycles, locality):")
    report.add_images([(_strip(ranking, a), _figures(ranking, a)) for a in ranking.kept], width=_SHOWN * _SIDE)
    report.add_paragraph("Dropped, and why:")
    strips = [(_strip(ranking, a), f"{_figures(ranking, a)}: {'; '.join(why)}") for a, why in ranking.dropped.items()]
    report.add_images(strips, width=_SHOWN * _SIDE)


def _figures(ranking: Ranking, address: str) -> str:
    p = ranking.properties[address]
    return f"{address} ({p.noise:.3f}, {p.granularity:.1f}, {p.locality:.2f})"


def _strip(ranking: Ranking, address: str) -> Image:
    return to_pil(ranking.strip(address, _SIDE)[:, :, : _SHOWN * _SIDE])
