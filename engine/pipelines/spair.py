"""SPair-71k on a pipeline: every picture tapped once into a folder, every pair matched by nearest features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..activations.correspondence import feature_maps
from ..activations.spair import SPairPair, SPairScore, nearest_points, score_spair
from ..footprint import memory_bytes
from ..progress import Progress, silent
from ..rows import RowFile

ALPHAS = (0.05, 0.1, 0.15)
_HELD, _MATCHED = 4, "matched"
"""Share of the budget for joined features of pictures that pairs have in common; the folder of what was matched."""


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
    pipe: Any, pairs: Sequence[SPairPair], cache: str | Path, run: SPairRun | None = None,
    progress: Progress = silent, matching: Progress = silent,
) -> dict[float, SPairScore]:  # fmt: skip
    """alpha -> scores of the pairs; the same call goes on where it was stopped.

    Args:
        pipe: a :class:`~vitrine.engine.pipelines.CorrespondencePipeline`.
        cache: folder for the features and the matches.
        progress, matching: over pictures that are tapped, and over pairs.

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

    def joined(name: str) -> torch.Tensor:
        return feature_maps(taps.read([name], every))[0]

    each = joined(next(iter(files))).nbytes
    held = lru_cache(maxsize=max(2, memory_bytes(run.memory) // _HELD // each))(joined)
    matches = _matches(pairs, lambda file: held(_name(file)).to(pipe.device), Path(cache), (run.grid, every), matching)
    return {alpha: score_spair(pairs, lambda p: matches[p.name], alpha) for alpha in ALPHAS}


def _matches(
    pairs: Sequence[SPairPair], features_of: Any, cache: Path, matched: tuple[int, list[str]], progress: Progress
) -> dict[str, torch.Tensor]:
    """Pair -> (N, 2) target points, each pair's kept on disk once it is known."""
    grid, places = matched
    most = max(len(p.source_points) for p in pairs)
    identity = [[p.name for p in pairs], grid, places]
    mark = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]  # a cache may serve many choices of pairs
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].source, pairs[i].target))  # pictures in common together
    with RowFile(cache / f"{_MATCHED}-{mark}", (len(pairs), 2 * most), identity) as table:
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
