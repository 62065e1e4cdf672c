"""Model files: coefficients, the space's hash, and the model's history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import refuse
from ...io.files import named, parse_json, read_artefact, save_artefact
from ...io.folders import has_ending
from ...io.hub import Shared
from ...io.number_checks import all_finite
from ...settings.one_line import one_line
from .delta_space import Space
from .space_checks import check_history, check_numbers

KIND, VERSION = "vitrine.w2w.model", 1


@one_line
@dataclass(frozen=True)
class W2WModel(Shared):
    """One or more models of a space.

    Attributes:
        coefficients: (B, K) float32.
        space: the hash of the space they belong to.
        history: provenance, oldest first: {"sample": ...}, {"edit": ...}, {"invert": ...}, {"blend": ...}.
    """

    FILE = "model.w2wmodel.safetensors"
    TITLE = "Model of a weight space"
    ABOUT = "Coefficients in a space of LoRAs (weights2weights, arXiv:2406.09413); it needs that space."
    FOLDER = "vitrine_w2w"

    coefficients: torch.Tensor
    space: str
    history: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.coefficients.ndim != 2 or not self.coefficients.numel():
            raise refuse("coefficients", tuple(self.coefficients.shape), "(B, K)", "one vector for each model")
        if not all_finite(self.coefficients):
            raise refuse("coefficients", "NaN or Inf", "finite numbers", "check the step that made this model")

    def __len__(self) -> int:
        return len(self.coefficients)

    def __getitem__(self, index: int) -> W2WModel:
        return W2WModel(self.coefficients[index : index + 1 or None], self.space, self.history)

    def moved_to(self, coefficients: torch.Tensor, **step: Any) -> W2WModel:
        """These models with other coefficients (B, K) and one more step of history, such as ``edit={...}``."""
        return W2WModel(coefficients, self.space, (*self.history, step))

    @property
    def start(self) -> float:
        """The timestep from which its last edit is applied; 1000, the whole run, by default."""
        return float(self.history[-1].get("start", 1000.0)) if self.history else 1000.0

    def belongs(self, space: Space) -> W2WModel:
        """The model itself, if it belongs to this space."""
        if self.space != space.identity:
            shown, accepted = f"a model of space {self.space}", f"one of space {space.identity}"
            raise refuse("model", shown, accepted, "load the space it belongs to, or encode its LoRA in this one")
        return self

    def only(self, space: Space) -> torch.Tensor:
        """(k,) coefficients, where one model is wanted."""
        if len(self) != 1:
            remedy = "take one: invert one picture at a time (Image From Batch), or write model[0] in Python"
            raise refuse("model", f"{len(self)} models", "one", remedy)
        return self.belongs(space).coefficients[0]

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file atomically."""
        header = {"space": self.space, "history": json.dumps(list(self.history))}
        return save_artefact(path, {"beta": self.coefficients.float()}, KIND, VERSION, header, self._rebuilt)

    @classmethod
    def load(cls, path: str | Path) -> W2WModel:
        """Reads a file of :meth:`save`."""
        if has_ending(path, ".pt"):
            remedy = "of the published code's: vitrine w2w export SPACE w2wmodel.pt"
            raise refuse("model", Path(path).name, "a .w2wmodel.safetensors file", remedy)
        tensors, header = read_artefact(path, KIND, VERSION)
        with named(path, "model", "coefficients and their history", "save it again"):
            return cls._rebuilt(tensors, header)

    @classmethod
    def _rebuilt(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> W2WModel:
        check_numbers(tensors)
        space, history = str(header["space"]), check_history(parse_json(header["history"]))
        return cls(tensors["beta"].float(), space, history)
