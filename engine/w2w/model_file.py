"""A model of a space as a small file: coefficients, the space's hash, and how it came to be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from ..files import read_artefact, save_artefact
from .directions import Space

KIND, VERSION = "vitrine.w2w.model", 1


@dataclass(frozen=True)
class W2WModel:
    """One or more models of a space.

    Attributes:
        coefficients: (B, K) float32.
        space: the hash of the space they belong to.
        history: provenance, oldest first: {"sample": ...}, {"edit": ...}, {"invert": ...}, {"blend": ...}.
    """

    coefficients: torch.Tensor
    space: str
    history: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.coefficients.ndim != 2:
            given = tuple(self.coefficients.shape)
            raise refuse("coefficients", given, "(B, K)", "one row for each model")

    def __len__(self) -> int:
        return len(self.coefficients)

    def __getitem__(self, index: int) -> W2WModel:
        return W2WModel(self.coefficients[index : index + 1 or None], self.space, self.history)

    def told(self, coefficients: torch.Tensor, **what: Any) -> W2WModel:
        """The model after one more step of its history."""
        return W2WModel(coefficients, self.space, (*self.history, what))

    def belongs(self, space: Space) -> W2WModel:
        """Itself, if it was made in this space.

        Raises:
            VitrineError: it was made in another one.
        """
        if self.space != space.identity:
            given, wanted = f"a model of space {self.space}", f"one of space {space.identity}"
            raise refuse("model", given, wanted, "load the space it was made in, or encode its LoRA in this one")
        return self

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all."""
        head = {"space": self.space, "history": json.dumps(list(self.history))}
        return save_artefact(path, {"beta": self.coefficients.float()}, KIND, VERSION, head)

    @classmethod
    def load(cls, path: str | Path) -> W2WModel:
        """Read what :meth:`save` wrote.

        Raises:
            VitrineError: no such file, another kind, NaN, or cut short.
        """
        tensors, head = read_artefact(path, KIND, VERSION)
        return cls(tensors["beta"].float(), head["space"], tuple(json.loads(head["history"])))
