"""What a principal component analysis has summed so far, in a file from which a killed one goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from ...jobs.run import Run

SAVE_SECONDS = 60.0
"""What a killed build loses at most, and one shard: sums of many models take a while to write."""


class BuildState:
    """Named sums, and which columns are in them.

    Attributes:
        tensors: ``mean`` and ``scale`` (D,) float32, ``done`` (D,) uint8, and the sums of the route.
    """

    def __init__(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        self._run, self.tensors = run, tensors
        self._saved_at, self._entering = time.monotonic(), False

    @classmethod
    def of(cls, path: str | Path | None, inputs: Mapping[str, Any]) -> Self:
        """The state in a file, or an empty one; ``inputs`` are what makes two builds the same.

        Raises:
            VitrineError: If the file belongs to another build.
        """
        run = Run(path, "principal components", inputs)
        state = run.load()
        return cls(run, {} if state is None else state.tensors["sums"])

    def begin(self, d: int, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """New tensors: those of all routes, and ``sums``."""
        self.tensors |= {"mean": torch.zeros(d), "scale": torch.zeros(d), "done": torch.zeros(d, dtype=torch.uint8)}
        self.tensors |= sums
        return self.tensors

    def describe(self, start: int, stop: int, z: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Notes the means and deviations of some columns, which now enter the sums; returns z."""
        self._entering = True
        self.tensors["mean"][start:stop], self.tensors["scale"][start:stop] = mean, scale
        return z

    def finish(self, start: int, stop: int) -> None:
        """Columns are in all sums."""
        self.tensors["done"][start:stop] = 1
        self._entering = False
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def next_turn(self) -> None:
        """The columns are gone through once more."""
        self.tensors["done"].zero_()
        self.tensors["turn"] += 1
        self.save()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a loop over columns: saved at its end, and when it is interrupted between two shards."""
        try:
            yield
        finally:
            if not self._entering:
                self.save()

    def save(self) -> None:
        """Writes the file, if there is one."""
        self._run.save({"sums": self.tensors})
        self._saved_at = time.monotonic()
