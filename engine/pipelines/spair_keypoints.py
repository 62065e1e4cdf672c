"""SPair-71k on a pipeline: every picture tapped once into a folder, every pair matched by nearest features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.spair_dataset import SPairPair, SPairScore, nearest_points, score_spair
from ..io.table_on_disk import RowFile
from ..jobs.digests import Files, digest
from ..jobs.run import Run
from ..runtime.footprint import memory_bytes
from ..runtime.progress import Progress, silent
from .components import components_of
from .picture_features import FeatureSettings, picture_features

if TYPE_CHECKING:
    from .activation_tap import TapPipeline

ALPHAS = (0.05, 0.1, 0.15)
_HELD, _MATCHED = 4, "matched"
"""Share of the budget for joined features of pictures that pairs have in common; the folder of what was matched."""


@dataclass(frozen=True)
class SPairRun:
    """What is tapped, and how it is matched.

    Attributes:
        addresses, preset: sites or globs, or a published selection of them.
        prompt: for each category's pictures; ``{category}`` is its name.
        size: side in pixels that pictures are squeezed to; None takes the model's own.
        keep_aspect, protocol: as in :class:`FeatureSettings`.
        grid: positions to a side on which features are compared.
        memory: budget for features in memory.
        tap: further settings, such as timestep, seeds, modulate, discard.
    """

    addresses: Sequence[str] | None = None
    preset: str | None = None
    prompt: str = "a photo of a {category}"
    size: int | None = None
    keep_aspect: bool = False
    protocol: str = "vitrine"
    grid: int = 128
    memory: int | str = "2GB"
    tap: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> FeatureSettings:
        """What is tapped of each picture."""
        return FeatureSettings(
            None if self.addresses is None else tuple(self.addresses), self.preset, size=self.size,
            keep_aspect=self.keep_aspect, protocol=self.protocol, memory=self.memory, **self.tap,
        )  # fmt: skip


def spair_scores(
    pipe: TapPipeline, pairs: Sequence[SPairPair], cache: str | Path, run: SPairRun | None = None,
    progress: Progress = silent, matching: Progress = silent,
) -> dict[float, SPairScore]:  # fmt: skip
    """alpha -> scores of the pairs; the same call resumes where it was stopped.

    Args:
        pipe: a :class:`~vitrine.engine.pipelines.CorrespondencePipeline`.
        cache: folder for the features and the matches.
        progress, matching: over pictures that are tapped, and over pairs.
    """
    run = run or SPairRun()
    files = {_name(file): (file, p.category) for p in pairs for file in (p.source, p.target)}
    texts = {name: run.prompt.format(category=category) for name, (_, category) in files.items()}
    paths = {name: file for name, (file, _) in files.items()}
    joined = picture_features(pipe, paths, texts, Path(cache), run.features, progress)
    each = joined(next(iter(files))).nbytes
    held = lru_cache(maxsize=max(2, memory_bytes(run.memory) // _HELD // each))(joined)
    settings = {"grid": run.grid, "features": run.features.to_dict() | {"memory": None}}
    inputs = {**components_of(pipe), "pictures": Files(paths.values()), "prompts": texts, "settings": settings}
    matches = _matches(pairs, lambda file: held(_name(file)).to(pipe._adapter.device), Path(cache), inputs, matching)
    return {alpha: score_spair(pairs, lambda p: matches[p.name], alpha) for alpha in ALPHAS}


def _matches(
    pairs: Sequence[SPairPair], features_of: Any, cache: Path, inputs: dict[str, Any], progress: Progress
) -> dict[str, torch.Tensor]:
    """Pair -> (N, 2) target points, each pair's kept on disk once it is known."""
    settings, grid = inputs["settings"], inputs["settings"]["grid"]
    most = max(len(p.source_points) for p in pairs)
    asked = [[p.name, p.source_points, list(p.source_size), list(p.target_size)] for p in pairs]
    folder = cache / f"{_MATCHED}-{digest([asked, settings])[:12]}"  # a cache may serve many choices of pairs
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].source, pairs[i].target))  # pictures in common together
    run = Run(folder, "SPair matches", inputs, ("rows.json",))
    with run, RowFile(folder, (len(pairs), 2 * most)) as table:
        for step, i in enumerate(order):
            if not table.done[i]:
                row = torch.zeros(most, 2)
                points = nearest_points(pairs[i], features_of, grid)
                row[: len(points)] = points.cpu()
                table.write(i, row.flatten()[None])
            progress(step + 1, len(pairs), None)
        rows = table.rows(range(len(pairs))).view(len(pairs), most, 2)
    return {p.name: row[: len(p.source_points)] for p, row in zip(pairs, rows, strict=True)}


def _name(file: Path) -> str:
    """A picture's name in the cache; pictures of two categories may share a file name."""
    return f"{file.parent.name}/{file.name}"
