"""Sums of a Gram matrix over layers, in a file from which a killed build goes on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from ..files import read_artefact, save_artefact
from .build_state import SAVE_SECONDS

KIND, VERSION = "vitrine.w2w.gram", 1


class GramState:
    """(N, N) sums so far, and the layers in them.

    Args:
        path: of the file; None keeps none.
        facts: what makes two builds the same.

    Raises:
        VitrineError: If the file belongs to another build.
    """

    def __init__(self, path: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self.path, self.facts, self.done = path, dict(facts or {}), list[str]()
        self._sums: torch.Tensor | None = None
        self._saved_at = time.monotonic()
        if path is None or not path.is_file():
            return
        tensors, header = read_artefact(path, KIND, VERSION)
        if header.get("build") != self.facts:
            raise refuse("unfinished build", "one of other LoRAs or settings", "these", f"delete {path.name}")
        self._sums, self.done = tensors["G"], list(header["done"])

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
        if self.path is not None and self._sums is not None:
            header = {"build": self.facts, "done": self.done}
            save_artefact(self.path, {"G": self._sums}, KIND, VERSION, header)
        self._saved_at = time.monotonic()
