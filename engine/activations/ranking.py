"""Which places of a model to tap: the filter's three scores, then a greedy search if pictures are labelled.

This is GDF's whole recipe (sections 4.3 and 5) as one call, for any model whose places have addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..addresses import resolve
from ..config import Config
from ..denoiser import Denoiser
from ..errors import refuse
from ..fingerprint import fingerprint_of
from ..processes import ALONE, Workers
from ..progress import Progress, silent
from .config import TapConfig
from .container import Activations
from .features import Features
from .filter import FilterRule, Properties, measure_properties
from .greedy_search import Budget, ScoreOf, SearchResult, greedy_search
from .pca import PCABasis, pca_rgb
from .pictures import Pictures
from .preset_files import FeaturePreset
from .presets import Preset
from .segmentation import ProbeSettings, confusion, fit_probe_on, iou
from .tap import tap_latents

PICTURES_SCORED = 16
"""The filter scores so many pictures at most; with eight, localities differ by 0.04 between sets of pictures."""


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
        strips: also tap the scored pictures at every place, for :meth:`Ranking.strip`.

    Raises:
        VitrineError: If ``most`` is below 1.
    """

    patterns: str | tuple[str, ...] = "*"
    timestep: float = 50.0
    rule: FilterRule = FilterRule()
    budget: int | None = None
    most: int = 4
    strips: bool = False

    def __post_init__(self) -> None:
        if self.most < 1:
            raise refuse("most places", self.most, "1 or more", "GDF chooses four")

    def within(self, widths: Mapping[str, int]) -> Budget | None:
        """The bound on channels, where there is one."""
        return None if self.budget is None else Budget(widths, self.budget)


@dataclass(frozen=True)
class Ranking:
    """A model's places, scored and chosen from.

    Attributes:
        properties: address -> the three scores.
        dropped: address -> why the filter dropped it.
        search: scores on the labelled pictures of the places that the filter kept; None without labels.
        chosen: the places to tap.
        taps: of the first pictures, at every place, for strips; None if they were not wanted.
    """

    properties: dict[str, Properties]
    dropped: dict[str, list[str]]
    search: SearchResult | None
    chosen: tuple[str, ...]
    taps: Activations | None = field(default=None, repr=False)

    @property
    def kept(self) -> list[str]:
        """Places the filter kept, best first if they were searched."""
        if self.search is not None:
            return list(self.search.singles)
        return [a for a in self.properties if a not in self.dropped]

    def summary(self) -> str:
        """A table to read: kept places with their figures, then the dropped ones with reasons."""
        lines = [f"{len(self.kept)} of {len(self.properties)} places kept", "chosen: " + ", ".join(self.chosen), ""]
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
            numbers |= {"score": self.search.score, "single": {a: self.search.singles[a] for a in self.chosen}}
        preset = Preset(name, self.chosen, timestep, type(backbone).__name__, 0, "ranked by Vitrine", numbers)
        return FeaturePreset(preset, fingerprint or fingerprint_of(backbone), {"dropped": self.dropped})

    def strip(self, address: str, size: int = 96) -> torch.Tensor:
        """(3, size, B size) in [0, 1]: the place's principal components as colours, one basis for all pictures.

        Raises:
            VitrineError: If the ranking was made without strips, or without this place.
        """
        if self.taps is None or address not in self.taps:
            raise refuse("strip", address, "places that were tapped", "rank with strips=True")
        pictures = pca_rgb(self.taps[address], PCABasis.fit(self.taps[address]), size)
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
    """Filter all places, then search among those it keeps with a pixel probe on the masks.

    Args:
        pictures: the filter scores the first sixteen. Where they have masks, the first half fits probes and the second
            judges them; without, places are ranked by the filter alone, the least noisy ones first.
        state: a folder for finished scores; the same call resumes from it.
        memory: budget in bytes or as "2GB" for what is held beyond the models and a bare forward: activations of many
            pictures wait in ``state``, or in a temporary folder, and where not all labelled pixels fit, probes see
            fewer of each picture. None keeps all in memory.
        workers: processes that share the pictures; all return the same.

    Raises:
        VitrineError: If there are fewer than four labelled pictures, only one class, or the filter keeps nothing.
    """
    config = config or RankingConfig()
    classes = None if pictures.masks is None else pictures.classes()
    places = spatial_places(denoiser.backbone, config.patterns)
    folder = Path(state) if state is not None and workers.index == 0 else None
    scored, cond = pictures.source(range(min(pictures.count, PICTURES_SCORED)))
    properties = measure_properties(
        denoiser, scored, cond, places, config.timestep, progress=progress, memory=memory,
        state=None if folder is None else folder / "filter.json",
    )  # fmt: skip
    candidates, dropped = config.rule.apply(properties)
    if not candidates:
        raise refuse("filter", f"all {len(places)} places dropped", "a rule that keeps some", "loosen its bounds")
    search, scores = None, None if folder is None else folder / "scores.json"
    if classes is not None:
        tapped = TapConfig(tuple(candidates), config.timestep)
        with Features.of(denoiser, pictures, tapped, memory, state, progress, workers) as features:
            score, budget = _scoring(features, pictures, *classes), config.within(features.widths)
            search = greedy_search(
                candidates, score, budget=budget, most=config.most, tie=TIE, state=scores, progress=progress
            )
            workers.meet()  # who is first must not remove what others read
        chosen = search.chosen
    else:
        chosen = tuple(sorted(candidates, key=lambda a: properties[a].noise)[: config.most])
    taps = tap_latents(denoiser, scored, cond, TapConfig(tuple(places), config.timestep)) if config.strips else None
    return Ranking(properties, dropped, search, chosen, taps)


def _scoring(features: Features, pictures: Pictures, classes: int, size: tuple[int, int]) -> ScoreOf:
    """Mean IoU, on the second half of the pictures, of a probe that is fitted on some places of the first half."""
    half, masks = pictures.count // 2, pictures.masks
    assert masks is not None
    # class scores of every pixel, their maximum, and the mask with its copies
    beside = size[0] * size[1] * (4 * classes + 4 * 8)

    def score(places: tuple[str, ...]) -> float:
        settings = ProbeSettings(pixels=features.pixels(places, half, ProbeSettings().pixels))
        known = ((maps, masks(rows)) for rows, maps in features.batches(places, range(half), beside))
        probe, table = fit_probe_on(known, classes, settings), torch.zeros(classes, classes, dtype=torch.long)
        for rows, maps in features.batches(places, range(half, pictures.count), beside):
            table += confusion(probe.predict(maps, size), masks(rows), classes).sum(0)
        return iou(table)[0]

    return score
