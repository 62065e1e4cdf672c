"""Sums of a Gram matrix over layers, in a file from which a killed build goes on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ...jobs.run import Run
from .build_state import SAVE_SECONDS


class GramState:
    """(N, N) sums so far, and the layers in them.

    Args:
        path: of the file; None keeps none.
        inputs: what makes two builds the same.

    Raises:
        VitrineError: If the file belongs to another build.
    """

    def __init__(self, path: Path | None = None, inputs: Mapping[str, Any] | None = None) -> None:
        self._run, self.done = Run(path, "products of LoRAs", inputs or {}), list[str]()
        self._sums: torch.Tensor | None = None
        self._saved_at = time.monotonic()
        state = self._run.load()
        if state is not None:
            self._sums, self.done = state.tensors["sums"]["G"], list(state.facts["done"])

    def begin(self, count: int) -> torch.Tensor:
        """The sums, zero where nothing was done; they are changed in place."""
        if self._sums is None:
            self._sums = torch.zeros(count, count, dtype=torch.float64)
        return self._sums

    def left(self, layers: Collection[str]) -> int:
        """How many layers are not in the sums."""
        return len(layers) - len(self.done)

    def finish(self, layer: str) -> None:
        """A layer is in the sums; at most a minute of work is lost with the process."""
        self.done.append(layer)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Writes the file, if there is one."""
        if self._sums is not None:
            self._run.save({"sums": {"G": self._sums}}, facts={"done": self.done})
        self._saved_at = time.monotonic()
