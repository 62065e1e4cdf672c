"""The threshold below which few-step samples agree: measured on ordinary captions, as a file that knows its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import printable, refuse
from ..io.files import named, read_artefact, save_artefact
from ..io.number_checks import integer
from ..tracing.fingerprint import same_weights
from .search_config import FewStepConfig

NAME = "samples.safetensors"
KIND, VERSION = "vitrine-nemo-samples", 1
ALARMS = 0.01
"""Share of ordinary captions that are meant to fall below the threshold."""
TAIL = 0.1
"""Share of the captions, those whose samples differ least, that the tail below is estimated from."""
LEAST = 2
"""Captions; 300 are a good start."""
FIRST_PAIR = 0.7
"""Of the usual distance: where the first two samples differ more, no others are made."""


@dataclass(frozen=True)
class SampleThreshold:
    """What is usual for ordinary captions of one model, at one setting.

    Attributes:
        distance: below it a prompt's samples agree: it is memorized.
        usual: geometric mean of ordinary captions' distances.
        places: (64, 64) mean square of the difference of two samples of one caption around each position.
        count: captions that it was measured on.
        config: how the samples were made; detection must use the same.
        fingerprint: of the model's weights.
    """

    distance: float
    usual: float
    places: torch.Tensor
    count: int
    config: FewStepConfig
    fingerprint: str = ""

    @property
    def first_pair(self) -> float:
        """Distance of the first two samples above which no others are made."""
        return FIRST_PAIR * self.usual

    @classmethod
    def of(
        cls, distances: Sequence[float], places: torch.Tensor, config: FewStepConfig, fingerprint: str = ""
    ) -> SampleThreshold:
        """From the distances of ordinary captions' samples."""
        values = torch.tensor(list(distances), dtype=torch.float64)
        count = len(values)
        if count < LEAST or not bool((values > 0).all()):
            raise refuse("ordinary captions", count, f"{LEAST} or more whose samples differ", "300 are a good start")
        logs = values.log().sort().values
        made = replace(config, two_stage=False)
        return cls(_quantile(logs), float(logs.mean().exp()), places, count, made, fingerprint)

    def text(self) -> str:
        """What was measured, in a sentence."""
        made = f"{self.config.seeds} samples of {self.config.steps} steps, guidance {self.config.guidance:g}"
        measured = f"{self.count} ordinary captions: {made} differ by {self.usual:.4f}"
        return f"{measured}; memorized is below {self.distance:.4f}"

    def check(self, fingerprint: str) -> SampleThreshold:
        """Itself, if it is of the model with this fingerprint."""
        if self.fingerprint and not same_weights(self.fingerprint, fingerprint):
            accepted = f"one measured on this model, {fingerprint[:20]}..."
            remedy = "vitrine nemo calibrate with this --model"
            raise refuse("threshold", f"measured on {self.fingerprint[:20]}...", accepted, remedy)
        return self

    def check_settings(self, config: FewStepConfig) -> None:
        """Refuses samples made in another way than those it was measured on."""
        if replace(config, two_stage=False) != self.config:
            raise refuse("settings", config.to_dict(), self.config.to_dict(), "take the threshold's own settings")

    def save(self, path: str | Path) -> Path:
        """One safetensors file, whole or not at all."""
        header = {
            "distance": self.distance, "usual": self.usual, "count": self.count, "settings": self.config.to_dict(),
            "fingerprint": self.fingerprint,
        }  # fmt: skip
        return save_artefact(path, {"places": self.places}, KIND, VERSION, header, self._rebuilt)

    @classmethod
    def load(cls, path: str | Path) -> SampleThreshold:
        """Read such a file, or the one in a folder that ``vitrine nemo calibrate`` wrote."""
        path = Path(path)
        path = path / NAME if path.is_dir() else path
        with named(path, "threshold file", "what vitrine nemo calibrate wrote", "calibrate first"):
            return cls._rebuilt(*read_artefact(path, KIND, VERSION))

    @classmethod
    def _rebuilt(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> SampleThreshold:
        distance, usual = float(header["distance"]), float(header["usual"])
        count = integer(header["count"], "captions", LEAST)
        config, positions = FewStepConfig.from_dict(dict(header["settings"])), tensors["places"]
        if not 0 < distance < usual < 1e6 or positions.shape != (64, 64) or not bool((positions >= 0).all()):
            raise ValueError(f"distance {distance}, usual {usual}, places {tuple(positions.shape)}")
        return cls(distance, usual, positions, count, config, printable(str(header["fingerprint"])))


def _quantile(logs: torch.Tensor) -> float:
    """Distance below which the next ordinary caption falls with a chance of 1 %, from (N,) ascending logarithms.

    Logarithms below the tenth part's end are taken for exponential (Pickands 1975). The next one's chance of being t
    below that end is then (k + 1) / (N + 1) * (1 + t / (k b))^-k, with b the mean of the k that are below.
    """
    count = len(logs)
    k = min(max(2, round(TAIL * count)), count - 1)
    scale = float((logs[k] - logs[:k]).mean())
    return math.exp(float(logs[k]) - k * scale * (((k + 1) / ((count + 1) * ALARMS)) ** (1 / k) - 1))
