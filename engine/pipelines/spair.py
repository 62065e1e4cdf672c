"""SPair-71k on a pipeline: every picture tapped once into a folder, every pair matched by nearest features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..activations.correspondence import feature_maps
from ..activations.spair import SPairPair, SPairScore, nearest_points, score_spair
from ..progress import Progress, silent

ALPHAS = (0.05, 0.1, 0.15)


@dataclass(frozen=True)
class SPairRun:
    """What is tapped, and how it is matched.

    Attributes:
        addresses, preset: places or globs, or a published selection of them.
        prompt: for each category's pictures; ``{category}`` is its name.
        size: side in pixels that pictures are squeezed to; None takes the model's own.
        grid: positions to a side on which features are compared.
        memory: budget for features in memory.
        tap: further settings, such as timestep, seeds, modulate, discard.
    """

    addresses: Sequence[str] | None = None
    preset: str | None = None
    prompt: str = "a photo of a {category}"
    size: int | None = None
    grid: int = 128
    memory: int | str = "2GB"
    tap: Mapping[str, Any] = field(default_factory=dict)


def spair_scores(
    pipe: Any, pairs: Sequence[SPairPair], cache: str | Path, run: SPairRun | None = None, progress: Progress = silent
) -> dict[float, SPairScore]:
    """alpha -> scores of the pairs; the same call goes on where it was stopped.

    Args:
        pipe: a :class:`~vitrine.engine.pipelines.CorrespondencePipeline`.
        cache: folder for the features.

    Raises:
        VitrineError: If a picture is missing, or as the pipeline's ``stream``.
    """
    run = run or SPairRun()
    files = {_name(file): (file, p.category) for p in pairs for file in (p.source, p.target)}
    texts = {name: run.prompt.format(category=category) for name, (_, category) in files.items()}
    places = None if run.addresses is None else list(run.addresses)
    taps = pipe.stream(
        {name: file for name, (file, _) in files.items()}, cache, texts, places, run.preset,
        memory=run.memory, callback=progress, size=run.size or pipe.own_size(), **run.tap,
    )  # fmt: skip
    every = [a for part in taps.parts for a in part]

    @lru_cache(maxsize=64)
    def features_of(file: Path) -> Any:
        return feature_maps(taps.read([_name(file)], every))[0]

    matches = {p.name: nearest_points(p, features_of, run.grid) for p in pairs}
    return {alpha: score_spair(pairs, lambda p: matches[p.name], alpha) for alpha in ALPHAS}


def _name(file: Path) -> str:
    """A picture's name in the cache; pictures of two categories may share a file name."""
    return f"{file.parent.name}/{file.name}"
