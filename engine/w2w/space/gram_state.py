"""The resumable sums of a Gram matrix over layers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ...jobs.run import Run
from .build_state import SAVE_SECONDS


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
