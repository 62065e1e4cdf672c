"""Which places of a model to tap: the filter's three scores, then a greedy search where masks or points are known.

This is GDF's whole recipe (sections 4.3 and 5) as one call, for any model whose places have addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..jobs.run import Run
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from ..tracing.addresses import resolve
from ..tracing.fingerprint import fingerprint_of
from .activation_pca import PCABasis, pca_rgb
from .features import Features
from .greedy_search import Budget, ScoreOf, SearchResult, greedy_search
from .preset_files import FeaturePreset
from .presets import Preset
from .qualitative_filter import FilterRule, Properties, measure_properties, place_groups
from .ranked_pictures import Pictures
from .site_scores import Judge, Search, judge_by_masks, judge_by_points
from .splits import SPLITS
from .tap import tap_latents
from .tap_config import TapConfig

PICTURES_SCORED = 16
"""The filter scores so many pictures at most; with eight, localities differ by 0.04 between sets of pictures."""


_BEGUN = ("filter.json", "scores-*.json", "taps/shard-*.safetensors")
"""What the folder of a ranking holds once there is work to lose."""
TIE = 0.001
"""Scores this close are equal: between two machines, rounding moves a probe's score by up to 0.0003."""


@dataclass(frozen=True)
class RankingConfig(Config):
    """How places are ranked.

    Attributes:
        patterns: addresses or globs to rank.
        timestep: the network's own timestep; GDF takes 50.
        rule: which scores the filter accepts.
        budget: most channels of the chosen places together; None is no bound.
        most: most places in the choice.
        strips: also draw the scored pictures at every place, for :meth:`Ranking.strip`.
        split: which pictures with masks fit a probe and which judge it, see :func:`~.splits.folds_of`. Half of those
            that judge choose, the others score the choice; crossed, choices made without each part are scored on it.
        folds: of the crossed split.
        alpha: a point that lands within this share of the picture's longer side is right.

    Raises:
        VitrineError: If ``most`` is below 1, ``folds`` below 2, ``alpha`` not above 0, or there is no such split.
    """

    patterns: str | tuple[str, ...] = "*"
    timestep: float = 50.0
    rule: FilterRule = FilterRule()
    budget: int | None = None
    most: int = 4
    strips: bool = False
    split: str = "halves"
    folds: int = 4
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if self.most < 1:
            raise refuse("most layers", self.most, "1 or more", "GDF chooses four")
        if self.split not in SPLITS or self.folds < 2:
            raise refuse("split", (self.split, self.folds), f"{SPLITS}, folds >= 2", "'stratified' shares classes out")
        if self.budget is not None and self.budget < 1:
            raise refuse("budget", self.budget, "1 channel or more", "None is no bound")
        if not self.alpha > 0:
            raise refuse("alpha", self.alpha, "above 0", "0.1 is usual")

    def within(self, widths: Mapping[str, int]) -> Budget | None:
        """The bound on channels, where there is one."""
        return None if self.budget is None else Budget(widths, self.budget)


@dataclass(frozen=True)
class Ranking:
    """A model's places, scored and chosen from.

    Attributes:
        properties: address -> the three scores.
        dropped: address -> why the filter dropped it.
        search: scores, on the pictures that chose, of the places that the filter kept; None without labels.
        chosen: the places to tap.
        colours: address -> (B, 3, h, w) in [0, 1] of the first pictures, for strips; empty if they were not wanted.
        held_out: score of the choice on labelled pictures that chose nothing; None where there were too few.
    """

    properties: dict[str, Properties]
    dropped: dict[str, list[str]]
    search: SearchResult | None
    chosen: tuple[str, ...]
    colours: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    held_out: float | None = None

    @property
    def kept(self) -> list[str]:
        """Places the filter kept, best first if they were searched."""
        if self.search is not None:
            return list(self.search.singles)
        return [a for a in self.properties if a not in self.dropped]

    def summary(self) -> str:
        """A table to read: kept places with their figures, then the dropped ones with reasons."""
        lines = [f"{len(self.kept)} of {len(self.properties)} places kept", "chosen: " + ", ".join(self.chosen)]
        if self.search is not None:
            held = "too few pictures to hold any out" if self.held_out is None else f"{self.held_out:.3f} held out"
            lines.append(f"score: {held}, {self.search.score:.3f} where chosen")
        lines.append("")
        for a in self.kept:
            p = self.properties[a]
            score = f"  score {self.search.singles[a]:.3f}" if self.search else ""
            figures = f"noise {p.noise:.2f}  cycles {p.granularity:.2f}  locality {p.locality:.2f}"
            lines.append(f"{a}: {figures}{score}")
        return "\n".join([*lines, "", *(f"dropped {a}: {'; '.join(why)}" for a, why in self.dropped.items())])

    def preset(self, name: str, backbone: torch.nn.Module, timestep: float, fingerprint: str = "") -> FeaturePreset:
        """The chosen places as a preset to save."""
        numbers: dict = {"properties": {a: asdict(self.properties[a]) for a in self.chosen}}
        if self.search is not None:
            numbers |= {} if self.held_out is None else {"score": self.held_out}
            numbers |= {"score where chosen": self.search.score}
            numbers |= {"single": {a: self.search.singles[a] for a in self.chosen}}
        preset = Preset(name, self.chosen, timestep, type(backbone).__name__, 0, "ranked by Vitrine", numbers)
        return FeaturePreset(preset, fingerprint or fingerprint_of(backbone), {"dropped": self.dropped})

    def strip(self, address: str, size: int = 96) -> torch.Tensor:
        """(3, size, B size) in [0, 1]: the place's principal components as colours, one basis for all pictures.

        Raises:
            VitrineError: If the ranking was made without strips, or without this place.
        """
        if address not in self.colours:
            raise refuse("strip", address, "layers that were shown", "rank with strips=True")
        pictures = F.interpolate(self.colours[address], (size, size), mode="nearest")
        return torch.cat(list(pictures), 2)


def spatial_places(backbone: torch.nn.Module, patterns: str | Sequence[str] = "*") -> list[str]:
    """Addresses that match and have a grid, without the network's own input and output.

    Raises:
        VitrineError: If a pattern matches nothing.
    """
    kinds = ("spatial", "tokens")
    return [s.address for s in resolve(backbone, patterns) if s.kind in kinds and not s.address.startswith("unet-")]


def rank_places(
    denoiser: Denoiser,
    pictures: Pictures,
    config: RankingConfig | None = None,
    *,
    state: str | Path | None = None,
    memory: int | str | None = None,
    progress: Progress = silent,
    workers: Workers = ALONE,
) -> Ranking:
    """Filter all places, then search among those it keeps with a pixel probe on the masks, or by known points.

    Args:
        pictures: the filter scores the first sixteen. With masks, ``config.split`` says which fit probes and which
            judge them; with points, layers are judged by how many points they find. Held-out pictures score the
            choice. With neither, the filter alone ranks, the least noisy layers first.
        state: a folder for finished scores; the same call resumes from it, also with another rule, budget or split.
        memory: budget in bytes or as "2GB" for what is held beyond the models and a bare forward: activations of many
            pictures wait in ``state``, or in a temporary folder, and where not all labelled pixels fit, probes see
            fewer of each picture. None keeps all in memory.
        workers: processes that share the pictures; all return the same.

    Raises:
        VitrineError: If there are fewer than four pictures with masks, one class, a class missing from a part of the
            split, the filter keeps nothing, or the folder belongs to other inputs.
    """
    config = config or RankingConfig()
    judge = _judge(pictures, config)
    places = spatial_places(denoiser.backbone, config.patterns)
    folder = Path(state) if state is not None and workers.index == 0 else None
    with Run(state, "ranking", _inputs(denoiser, pictures, config), _BEGUN, workers) as run:
        made_of: dict[str, object] = {} if folder is None else {"ranking": run.mark}
        source = pictures.source(range(min(pictures.count, PICTURES_SCORED)))
        properties = measure_properties(
            denoiser, *source, places, config.timestep, progress=progress, memory=memory,
            state=_run(folder, "filter.json", made_of),
        )  # fmt: skip
        candidates, dropped = _kept(properties, config.rule)
        search = held_out = None
        chosen = tuple(sorted(candidates, key=lambda a: properties[a].noise)[: config.most])
        if judge is not None:
            tapped = TapConfig(tuple(candidates), config.timestep)
            made_of |= {"memory": None if memory is None else memory_bytes(memory)}  # a probe sees fewer pixels
            with Features.of(denoiser, pictures, tapped, memory, state, progress, workers) as features:
                searched = _search(candidates, config, config.within(features.widths), (folder, made_of), progress)
                search, held_out = judge(features, searched)
                workers.meet()  # who is first must not remove what others read
            chosen = search.chosen
    colours = _colours(denoiser, source, places, config.timestep, memory) if config.strips else {}
    return Ranking(properties, dropped, search, chosen, colours, held_out)


def _inputs(denoiser: Denoiser, pictures: Pictures, config: RankingConfig) -> dict[str, object]:
    return {**denoiser.inputs, "pictures": pictures, "timestep": config.timestep}


def _kept(properties: Mapping[str, Properties], rule: FilterRule) -> tuple[list[str], dict[str, list[str]]]:
    """(layers that the filter keeps, layer -> reasons why it was dropped)."""
    candidates, dropped = rule.apply(properties)
    if not candidates:
        raise refuse("filter", f"all {len(properties)} layers dropped", "a rule that keeps some", "loosen its bounds")
    return candidates, dropped


def _search(
    candidates: Sequence[str], config: RankingConfig, budget: Budget | None,
    kept: tuple[Path | None, dict[str, object]], progress: Progress,
) -> Search:  # fmt: skip
    """The greedy search, whose scores are kept in a file of a folder, with what they were made of."""
    folder, made_of = kept

    def search(score: ScoreOf, name: str) -> SearchResult:
        judged = {**made_of, "judged by": [config.split, config.folds, config.alpha]}
        how: dict = {"most": config.most, "tie": TIE, "state": _run(folder, name, judged), "progress": progress}
        return greedy_search(candidates, score, budget=budget, **how)

    return search


def _run(folder: Path | None, name: str, inputs: dict[str, object]) -> Run:
    """The part of a ranking that has a JSON file of its own in the folder."""
    return Run(None if folder is None else folder / name, name, inputs)


def _judge(pictures: Pictures, config: RankingConfig) -> Judge | None:
    """What judges places, once they are tapped; bad labels are refused before any work."""
    if pictures.pairs is not None:
        return judge_by_points(pictures.pairs, config.alpha)
    return None if pictures.masks is None else judge_by_masks(pictures, config.split, config.folds)


def _colours(
    denoiser: Denoiser, scored: tuple[torch.Tensor, Condition], places: list[str], timestep: float,
    memory: int | str | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Address -> (B, 3, h, w) principal components in [0, 1]; places are tapped group by group and let go."""
    groups, rows = place_groups(denoiser, *scored, places, timestep, memory)
    colours: dict[str, torch.Tensor] = {}
    for group in groups:
        taps = tap_latents(denoiser, *scored, TapConfig(group, timestep, batch=rows))
        colours |= {a: pca_rgb(v, PCABasis.fit(v)) for a, v in taps.items()}
    return colours
