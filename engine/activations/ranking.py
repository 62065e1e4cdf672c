"""Ranking of a model's sites: the filter's three scores, then a greedy search if masks or points are given.

This is GDF's whole recipe (sections 4.3 and 5) as one call, for any model with site names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..jobs.run import Run
from ..runtime.footprint import memory_bytes
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.ranking_options import RankingConfig
from ..tracing.addresses import resolve
from ..tracing.fingerprint import fingerprint_of
from .activation_pictures import PCABasis, pca_rgb
from .presets import FeaturePreset, Preset
from .qualitative_filter import Properties, filtered, measure_properties, site_groups
from .ranked_pictures import Pictures
from .site_search import (
    Budget,
    Judge,
    ScoreOf,
    SearchResult,
    greedy_search,
    judge_by_masks,
    judge_by_points,
)
from .streaming import Features
from .tap import tap_latents
from .tap_config import TapConfig

PICTURES_SCORED = 16
"""Most images that the filter scores; with eight, localities differ by 0.04 between sets of images."""


_BEGUN = ("filter.safetensors", "scores-*.safetensors", "taps/shard-*.safetensors")
"""Files of a ranking's folder that mean that there is work to lose."""
TIE = 0.001
"""Scores this close count as equal: rounding changes a probe's score by up to 0.0003 between machines."""


@dataclass(frozen=True)
class Ranking:
    """A model's sites with scores, and the choice.

    Attributes:
        properties: site name -> the three scores.
        dropped: site name -> why the filter dropped it.
        search: scores of the kept sites on the images used for the choice; None without labels.
        chosen: the sites to tap.
        colours: site name -> (B, 3, h, w) in [0, 1] of the first images, for strips; empty if they are off.
        held_out: score of the choice on held-out labelled images; None if there were too few.
    """

    properties: dict[str, Properties]
    dropped: dict[str, list[str]]
    search: SearchResult | None
    chosen: tuple[str, ...]
    colours: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    held_out: float | None = None

    @property
    def kept(self) -> list[str]:
        """Sites that the filter kept, best first if they were searched."""
        if self.search is not None:
            return list(self.search.singles)
        return [a for a in self.properties if a not in self.dropped]

    def summary(self) -> str:
        """A text table: kept sites with their scores, then the dropped ones with reasons."""
        lines = [f"{len(self.kept)} of {len(self.properties)} sites kept", "chosen: " + ", ".join(self.chosen)]
        if self.search is not None:
            score = "too few pictures for a held-out set" if self.held_out is None else f"{self.held_out:.3f} held out"
            lines.append(f"score: {score}, {self.search.score:.3f} where chosen")
        lines.append("")
        for a in self.kept:
            p = self.properties[a]
            score = f"  score {self.search.singles[a]:.3f}" if self.search else ""
            figures = f"noise {p.noise:.2f}  cycles {p.granularity:.2f}  locality {p.locality:.2f}"
            lines.append(f"{a}: {figures}{score}")
        return "\n".join([*lines, "", *(f"dropped {a}: {'; '.join(why)}" for a, why in self.dropped.items())])

    def preset(self, name: str, backbone: torch.nn.Module, timestep: float, fingerprint: str = "") -> FeaturePreset:
        """The chosen sites as a preset."""
        numbers: dict = {"properties": {a: asdict(self.properties[a]) for a in self.chosen}}
        if self.search is not None:
            numbers |= {} if self.held_out is None else {"score": self.held_out}
            numbers |= {"score where chosen": self.search.score}
            numbers |= {"single": {a: self.search.singles[a] for a in self.chosen}}
        preset = Preset(name, self.chosen, timestep, type(backbone).__name__, 0, "ranked by Vitrine", numbers)
        return FeaturePreset(preset, fingerprint or fingerprint_of(backbone), {"dropped": self.dropped})

    def strip(self, address: str, size: int = 96) -> torch.Tensor:
        """(3, size, B size) in [0, 1]: the site's principal components as colours, one basis for all images."""
        if address not in self.colours:
            raise refuse("strip", address, "layers that were ranked with strips", "rank with strips=True")
        pictures = F.interpolate(self.colours[address], (size, size), mode="nearest")
        return torch.cat(list(pictures), 2)


def spatial_sites(backbone: torch.nn.Module, patterns: str | Sequence[str] = "*") -> list[str]:
    """Names of matching sites that have a grid, without the network's own input and output."""
    kinds = ("spatial", "tokens")
    return [s.address for s in resolve(backbone, patterns) if s.kind in kinds and not s.address.startswith("unet-")]


def rank_sites(
    denoiser: Denoiser,
    pictures: Pictures,
    config: RankingConfig | None = None,
    *,
    state: str | Path | None = None,
    memory: int | str | None = None,
    progress: Progress = silent,
    workers: Workers = ALONE,
) -> Ranking:
    """Filters all sites, then searches the kept ones with a pixel probe on the masks, or by keypoints.

    Args:
        pictures: the filter scores the first sixteen. With masks, ``config.split`` says which fit and which validate
            probes; with points, sites are scored by the fraction of points they find. Held-out images score the choice.
            With neither, the filter alone ranks, the least noisy sites first.
        state: a folder for finished scores, from which the same call resumes, also with another rule, budget or split.
        memory: budget in bytes or as "2GB" in addition to the models and one forward: activations of many images are
            stored in ``state`` or a temporary folder, and if not all labelled pixels fit, probes use fewer per image.
            None keeps all in memory.
        workers: processes that divide the images; all return the same.
    """
    config = config or RankingConfig()
    judge = _judge(pictures, config)
    sites = spatial_sites(denoiser.backbone, config.layers)
    folder = Path(state) if state is not None and workers.index == 0 else None
    inputs = {**denoiser.inputs, "pictures": pictures, "timestep": config.timestep}
    with Run(state, "ranking", inputs, _BEGUN, workers) as run:
        made_of: dict[str, object] = {} if folder is None else {"ranking": run.mark}
        source = pictures.source(range(min(pictures.count, PICTURES_SCORED)))
        properties = measure_properties(
            denoiser,
            *source,
            sites,
            config.timestep,
            progress=progress,
            memory=memory,
            state=_run(folder, "filter.safetensors", made_of),
        )
        candidates, dropped = filtered(config.rule, properties)
        if not candidates:
            shown = f"all {len(properties)} layers dropped"
            raise refuse("filter", shown, "a rule that keeps some", "loosen its bounds")
        search = held_out = None
        chosen = tuple(sorted(candidates, key=lambda a: properties[a].noise)[: config.most])
        if judge is not None:
            tapped = TapConfig(tuple(candidates), config.timestep)
            made_of |= {"memory": None if memory is None else memory_bytes(memory)}  # a probe uses fewer pixels
            with Features.of(denoiser, pictures, tapped, memory, state, progress, workers) as features:
                budget = None if config.budget is None else Budget(features.widths, config.budget)
                judged = {**made_of, "judged by": [config.split, config.folds, config.alpha]}

                def searched(score: ScoreOf, name: str) -> SearchResult:
                    how: dict = {"most": config.most, "tie": TIE, "state": _run(folder, name, judged)}
                    return greedy_search(candidates, score, budget=budget, progress=progress, **how)

                search, held_out = judge(features, searched)
                workers.meet()  # the first must not remove what others read
            chosen = search.chosen
    colours: dict[str, torch.Tensor] = {}
    if config.strips:  # sites are tapped in groups and then released
        groups, rows = site_groups(denoiser, *source, sites, config.timestep, memory)
        for group in groups:
            taps = tap_latents(denoiser, *source, TapConfig(group, config.timestep, batch=rows))
            colours |= {a: pca_rgb(v, PCABasis.fit(v)) for a, v in taps.items()}
    return Ranking(properties, dropped, search, chosen, colours, held_out)


def _run(folder: Path | None, name: str, inputs: dict[str, object]) -> Run:
    """A part of a ranking with its own state file in the folder."""
    return Run(None if folder is None else folder / name, name, inputs)


def _judge(pictures: Pictures, config: RankingConfig) -> Judge | None:
    """The scoring function for tapped sites; bad labels are refused before any work."""
    if pictures.pairs is not None:
        return judge_by_points(pictures.pairs, config.alpha)
    return None if pictures.masks is None else judge_by_masks(pictures, config.split, config.folds)
