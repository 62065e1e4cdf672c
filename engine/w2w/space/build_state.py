"""The resumable states of a build: of a principal component analysis, and of a Gram matrix over layers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from ...jobs.run import Run

SAVE_SECONDS = 60.0
"""Most seconds of work that a killed build loses, plus one shard: sums of many models are slow to write."""


class BuildState:
    """Named sums, and the columns that they include.

    Attributes:
        tensors: ``mean`` and ``scale`` (D,) float32, ``done`` (D,) uint8, and the sums of the route.
    """

    def __init__(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        self._run, self.tensors = run, tensors
        self._saved_at, self._entering = time.monotonic(), False

    @classmethod
    def of(cls, path: str | Path | None, inputs: Mapping[str, Any]) -> Self:
        """The state in a file, or an empty one; ``inputs`` identify the build."""
        run = Run(path, "principal components", inputs)
        state = run.load()
        return cls(run, {} if state is None else state.tensors["sums"])

    def begin(self, d: int, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Initialises the tensors: those of all routes, and ``sums``."""
        self.tensors |= {"mean": torch.zeros(d), "scale": torch.zeros(d), "done": torch.zeros(d, dtype=torch.uint8)}
        self.tensors |= sums
        return self.tensors

    def describe(self, start: int, stop: int, z: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Stores means and deviations of columns before they enter the sums; returns z."""
        self._entering = True
        self.tensors["mean"][start:stop], self.tensors["scale"][start:stop] = mean, scale
        return z

    def finish(self, start: int, stop: int) -> None:
        """Marks columns as included in all sums."""
        self.tensors["done"][start:stop] = 1
        self._entering = False
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def next_turn(self) -> None:
        """Starts another pass over the columns."""
        self.tensors["done"].zero_()
        self.tensors["turn"] += 1
        self.save()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager around a loop over columns: saves at its end, and on an interruption between two shards."""
        try:
            yield
        finally:
            if not self._entering:
                self.save()

    def save(self) -> None:
        """Writes the file, if there is one."""
        self._run.save({"sums": self.tensors})
        self._saved_at = time.monotonic()


class GramState:
    """(N, N) sums so far, and the layers that they include.

    Args:
        path: path of the file; None stores none.
        inputs: identify the build.
    """

    def __init__(self, path: Path | None = None, inputs: Mapping[str, Any] | None = None) -> None:
        self._run, self.done = Run(path, "products of LoRAs", inputs or {}), list[str]()
        self._sums: torch.Tensor | None = None
        self._saved_at = time.monotonic()
        state = self._run.load()
        if state is not None:
            self._sums, self.done = state.tensors["sums"]["G"], list(state.facts["done"])

    def begin(self, count: int) -> torch.Tensor:
        """The sums, initially zero; they are changed in place."""
        if self._sums is None:
            self._sums = torch.zeros(count, count, dtype=torch.float64)
        return self._sums

    def left(self, layers: Collection[str]) -> int:
        """The number of layers that are not in the sums."""
        return len(layers) - len(self.done)

    def finish(self, layer: str) -> None:
        """Marks a layer as included; a killed process loses at most a minute of work."""
        self.done.append(layer)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Writes the file, if there is one."""
        if self._sums is not None:
            self._run.save({"sums": {"G": self._sums}}, facts={"done": self.done})
        self._saved_at = time.monotonic()
