"""The resumable state of a build: sums over columns of a matrix, or over layers of LoRAs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...jobs.run import Run

SAVE_SECONDS = 60.0
"""Most seconds of work that a killed build loses, plus one shard: sums of many models are slow to write."""


class BuildState:
    """Named sums, and the columns or layers that they include.

    Args:
        path: path of the file; None stores none.
        inputs: identify the build.

    Attributes:
        tensors: the sums, and ``done`` (D,) uint8; empty until :meth:`begin`, unless the file has them.
    """

    def __init__(self, path: str | Path | None, job: str, inputs: Mapping[str, Any]) -> None:
        self._run = Run(path, job, inputs)
        state = self._run.load()
        self.tensors: dict[str, torch.Tensor] = {} if state is None else state.tensors["sums"]
        self._saved_at, self._entering = time.monotonic(), False

    def begin(self, count: int, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Initialises the tensors: ``sums``, and none of ``count`` done."""
        self.tensors |= {**sums, "done": torch.zeros(count, dtype=torch.uint8)}
        return self.tensors

    def enter(self) -> None:
        """Called before columns enter the sums: until they are all in, nothing is saved."""
        self._entering = True

    def finish(self, start: int, stop: int) -> None:
        """Marks columns as included in all sums; a killed process loses at most a minute of work."""
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
