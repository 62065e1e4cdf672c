"""Which places of a model to tap: the filter's three scores, then a comparison on labelled pictures if there are any.

This is GDF's whole recipe (sections 4.3 and 5) as one call, for any model whose places have addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..addresses import resolve
from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..fingerprint import fingerprint_of
from ..progress import Progress, silent
from .config import TapConfig
from .container import Activations
from .correspondence import feature_maps
from .filter import FilterRule, Properties, measure_properties
from .greedy_search import Comparison, compare
from .parallel import first_process, shared_taps
from .pca import PCABasis, pca_rgb
from .preset_files import FeaturePreset
from .presets import Preset
from .segmentation import IGNORE, fit_probe, mean_iou
from .tap import tap_latents

LOOKED_AT = 16
"""Pictures the filter looks at; with eight, localities differ by 0.04 between sets of pictures."""


@dataclass(frozen=True)
class Ranking:
    """What was found out about a model's places.

    Attributes:
        properties: address -> the three scores.
        dropped: address -> why the filter dropped it.
        comparison: scores of the kept places on the labelled pictures; None without labels.
        chosen: the places to tap.
        taps: of the first pictures, at every place, for strips; may be empty.
    """

    properties: dict[str, Properties]
    dropped: dict[str, list[str]]
    comparison: Comparison | None
    chosen: tuple[str, ...]
    taps: Activations | None = field(default=None, repr=False)

    @property
    def kept(self) -> list[str]:
        """Places the filter kept, best first where they were compared."""
        if self.comparison is not None:
            return list(self.comparison.singles)
        return [a for a in self.properties if a not in self.dropped]

    def text(self) -> str:
        """A table to read: kept places with their figures, then the dropped ones with reasons."""
        lines = [f"{len(self.kept)} of {len(self.properties)} places kept", "chosen: " + ", ".join(self.chosen), ""]
        for a in self.kept:
            p = self.properties[a]
            score = f"  score {self.comparison.singles[a]:.3f}" if self.comparison else ""
            figures = f"noise {p.noise:.2f}  cycles {p.granularity:.2f}  locality {p.locality:.2f}"
            lines.append(f"{a}: {figures}{score}")
        return "\n".join([*lines, "", *(f"dropped {a}: {'; '.join(why)}" for a, why in self.dropped.items())])

    def preset(self, name: str, backbone: torch.nn.Module, timestep: float, fingerprint: str = "") -> FeaturePreset:
        """The chosen places as a preset to save."""
        numbers: dict = {"properties": {a: asdict(self.properties[a]) for a in self.chosen}}
        if self.comparison is not None:
            numbers |= {"score": self.comparison.score, "single": {a: self.comparison.singles[a] for a in self.chosen}}
        made = Preset(name, self.chosen, timestep, type(backbone).__name__, 0, "ranked by Vitrine", numbers)
        return FeaturePreset(made, fingerprint or fingerprint_of(backbone), {"dropped": self.dropped})

    def strip(self, address: str, size: int = 96) -> torch.Tensor:
        """(3, size, B size) in [0, 1]: the place's principal components as colours, one basis for all pictures."""
        if self.taps is None or address not in self.taps:
            raise refuse("strip", address, "places that were tapped", "rank with strips=True")
        pictures = pca_rgb(self.taps[address], PCABasis.fit(self.taps[address]), size)
        return torch.cat(list(pictures), 2)


def spatial_places(backbone: torch.nn.Module, patterns: str | Sequence[str] = "*") -> list[str]:
    """Addresses with a grid among those that match, without the network's own input and output."""
    kinds = ("spatial", "tokens")
    return [s.address for s in resolve(backbone, patterns) if s.kind in kinds and not s.address.startswith("unet-")]


def rank_places(
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    *,
    masks: torch.Tensor | None = None,
    patterns: str | Sequence[str] = "*",
    timestep: float = 50.0,
    rule: FilterRule | None = None,
    budget: int | None = None,
    most: int = 4,
    state: str | Path | None = None,
    strips: bool = False,
    progress: Progress = silent,
) -> Ranking:
    """Filter all places, then compare those that stay by a pixel probe on the masks.

    Args:
        latents: (B, C, h, w) clean latents; the filter looks at the first sixteen.
        masks: (B, H, W) class numbers, 255 where nobody knows; the first half fits probes, the second judges them.
            None ranks by the filter alone, the least noisy places first.
        budget: most channels of the combination.
        state: a folder for finished scores; the same call resumes from it.

    Raises:
        VitrineError: fewer than four labelled pictures, one class only, or nothing left after the filter.
    """
    if masks is not None:
        _check(latents, masks)
    names = spatial_places(denoiser.backbone, patterns)
    folder = Path(state) if state is not None and first_process() else None
    first = min(LOOKED_AT, len(latents))
    rows = torch.arange(first)
    seen = cond.take(rows) if len(latents) > 1 else cond
    properties = measure_properties(
        denoiser, latents[:first], seen, names, timestep, progress=progress,
        state=None if folder is None else folder / "filter.json",
    )  # fmt: skip
    kept, dropped = (rule or FilterRule()).apply(properties)
    if not kept:
        raise refuse("filter", f"all {len(names)} places dropped", "a rule that keeps some", "loosen its bounds")
    comparison = None
    if masks is not None:
        comparison = _compare(denoiser, latents, cond, masks, kept, timestep, budget, most, folder, progress)
        chosen = comparison.chosen
    else:
        chosen = tuple(sorted(kept, key=lambda a: properties[a].noise)[:most])
    taps = tap_latents(denoiser, latents[:first], seen, TapConfig(tuple(names), timestep)) if strips else None
    return Ranking(properties, dropped, comparison, chosen, taps)


def _compare(
    denoiser: Denoiser, latents: torch.Tensor, cond: Condition, masks: torch.Tensor, kept: list[str], timestep: float,
    budget: int | None, most: int, folder: Path | None, progress: Progress,
) -> Comparison:  # fmt: skip
    taps = shared_taps(denoiser, latents, cond, TapConfig(tuple(kept), timestep), progress)
    half, classes = len(latents) // 2, int(masks[masks != IGNORE].max()) + 1
    size = (int(masks.shape[-2]), int(masks.shape[-1]))
    widths = {a: int(v.tensor.shape[1]) for a, v in taps.items()}

    def score(picked: tuple[str, ...]) -> float:
        features = feature_maps(taps.select(list(picked)))
        probe = fit_probe(features[:half], masks[:half], classes)
        return mean_iou(probe.predict(features[half:], size), masks[half:], classes)[0]

    state = None if folder is None else folder / "scores.json"
    return compare(kept, score, channels=widths, budget=budget, most=most, state=state, progress=progress)


def _check(latents: torch.Tensor, masks: torch.Tensor) -> None:
    if len(masks) != len(latents) or len(masks) < 4:
        given = (len(masks), len(latents))
        raise refuse("masks, pictures", given, "one mask a picture, four or more", "half of them judges the probes")
    for name, part in (("first", masks[: len(masks) // 2]), ("second", masks[len(masks) // 2 :])):
        found = part[part != IGNORE].unique()
        if len(found) < 2:
            raise refuse(f"masks of the {name} half", f"classes {found.tolist()}", "two or more", "mix the pictures")
