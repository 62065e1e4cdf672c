"""What is usual on one model: statistics of its neurons and both thresholds of memorization, in one file.

Calibrate Copy Detection (NEMO), ``NEMOPipeline.calibrate`` and ``vitrine nemo calibrate`` make it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import printable, refuse
from ..io.files import named, read_artefact, save_artefact
from ..io.hub import Shared
from ..io.number_checks import integer
from ..settings.nemo_options import PAPER_TAU, FewStepConfig, ProbeConfig
from ..settings.one_line import one_line
from ..tracing.fingerprint import same_weights
from .neuron_statistics import NeuronStatistics, check_pairs

KIND, VERSION = "vitrine-nemo-calibration", 1
PARTS = ("statistics", "samples", "score")
"""What can be measured: neurons, how much few-step samples differ, and the score of one-step predictions."""
ALARMS = 0.01
"""Share of ordinary captions that are meant to fall below the threshold."""
TAIL = 0.1
"""Share of the captions, those whose samples differ least, that the tail below is estimated from."""
LEAST = 2
"""Captions; 300 are a good start."""
KEPT_CAPTIONS = 8
"""Of the captions that were sampled."""
FIRST_PAIR = 0.7
"""Of the usual distance: where the first two samples differ more, no others are made."""


@one_line
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
        _check_model(self.fingerprint, fingerprint)
        return self

    def check_settings(self, config: FewStepConfig) -> None:
        """Refuses samples made in another way than those it was measured on."""
        if replace(config, two_stage=False) != self.config:
            raise refuse("settings", config.to_dict(), self.config.to_dict(), "take the threshold's own settings")


def _quantile(logs: torch.Tensor) -> float:
    """Distance below which the next ordinary caption falls with a chance of 1 %, from (N,) ascending logarithms.

    Logarithms below the tenth part's end are taken for exponential (Pickands 1975). The next one's chance of being t
    below that end is then (k + 1) / (N + 1) * (1 + t / (k b))^-k, with b the mean of the k that are below.
    """
    count = len(logs)
    k = min(max(2, round(TAIL * count)), count - 1)
    scale = float((logs[k] - logs[:k]).mean())
    return math.exp(float(logs[k]) - k * scale * (((k + 1) / ((count + 1) * ALARMS)) ** (1 / k) - 1))


@one_line
@dataclass(frozen=True)
class ScoreThreshold:
    """The threshold of the published score of one-step predictions (NeMo, section 3.1).

    Attributes:
        tau: mean plus one deviation of the scores of ordinary captions.
        mean, std: of these scores.
        count: captions that it was measured on.
        probe: how they were scored; detection and search must do the same.
        fingerprint: of the model's weights; empty where it is not known.
    """

    tau: float
    mean: float
    std: float
    count: int
    probe: ProbeConfig
    fingerprint: str = ""

    @classmethod
    def of(cls, scores: Sequence[float], probe: ProbeConfig, fingerprint: str = "") -> ScoreThreshold:
        """From the largest score of each of some ordinary captions."""
        return cls(*threshold(scores), len(scores), probe, fingerprint)

    def text(self) -> str:
        """What was measured, in a sentence."""
        return f"tau {self.tau:.4f} = mean {self.mean:.4f} + std {self.std:.4f} of {self.count} captions"

    def check(self, fingerprint: str) -> ScoreThreshold:
        """Itself, if it is of the model with this fingerprint."""
        _check_model(self.fingerprint, fingerprint)
        return self


PUBLISHED = ScoreThreshold(PAPER_TAU, 0.358, 0.070, 50_000, ProbeConfig())
"""Of SD 1.4 at 512 px (NeMo, section 3.1)."""


def threshold(scores: Sequence[float], spread: float = 1.0) -> tuple[float, float, float]:
    """(tau, mean, std) from the largest score of each of some ordinary captions."""
    values = torch.tensor(list(scores), dtype=torch.float64)
    mean, std = float(values.mean()), float(values.std())
    # NeMo, section 3.1: tau = mean + std
    return min(mean + spread * std, 1.0), mean, std


def _check_model(measured: str, fingerprint: str) -> None:
    if measured and not same_weights(measured, fingerprint):
        accepted = f"one measured on this model, {fingerprint[:20]}..."
        raise refuse("threshold", f"measured on {measured[:20]}...", accepted, "vitrine nemo calibrate with this model")


@one_line
@dataclass(frozen=True)
class Calibration(Shared):
    """What is usual for ordinary captions of one model; a part that was not measured is None.

    Attributes:
        statistics: of the neurons: a search needs them.
        samples: how much few-step samples differ: detection by samples needs it for a verdict.
        score: the threshold of one-step predictions: detection in one step needs it, and the published search.
        captions: a few of the captions: a search measures on them what blocking costs others.
    """

    FILE = "calibration.safetensors"
    TITLE = "Calibration of one model"
    ABOUT = "Thresholds of one diffusion model that tell memorized prompts (NeMo, arXiv:2406.02366)."
    FOLDER = "vitrine_statistics"

    statistics: NeuronStatistics | None = None
    samples: SampleThreshold | None = None
    score: ScoreThreshold | None = None
    captions: tuple[str, ...] = ()

    def known(self, part: str) -> Any:
        """A part of :data:`PARTS`; refused where it was not measured."""
        value = getattr(self, part)
        if value is None:
            present = ", ".join(p for p in PARTS if getattr(self, p) is not None) or "nothing"
            raise refuse("calibration", f"{present} alone", f"one with {part}", "calibrate this model with that part")
        return value

    @property
    def scope(self) -> str:
        """Of the statistics' layers."""
        return "all" if any(a.startswith("up-") for a in self.known("statistics").means) else "down+mid"

    def tau_at(self, probe: ProbeConfig) -> float | None:
        """The threshold of the score, where it was measured as ``probe`` scores; else None."""
        return self.score.tau if self.score is not None and self.score.probe == probe else None

    def check(self, fingerprint: str) -> Calibration:
        """Itself, if its thresholds are of the model with this fingerprint; statistics are checked by the search."""
        for part in (self.samples, self.score):
            if part is not None:
                part.check(fingerprint)
        return self

    def text(self) -> str:
        """What was measured, one part a line."""
        lines = []
        if self.statistics is not None:
            layers, neurons = len(self.statistics.means), sum(map(len, self.statistics.means.values()))
            lines.append(f"{layers} layers, {neurons} neurons, {self.statistics.count} captions")
        lines += [part.text() for part in (self.samples, self.score) if part is not None]
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """One safetensors file, whole or not at all."""
        tensors: dict[str, torch.Tensor] = {}
        header: dict[str, Any] = {}
        if (neurons := self.statistics) is not None:
            tensors |= {f"mean/{a}": v for a, v in neurons.means.items()}
            tensors |= {f"std/{a}": v for a, v in neurons.stds.items()}
            header["statistics"] = {"count": neurons.count, "fingerprint": neurons.fingerprint}
        if (samples := self.samples) is not None:
            tensors["places"] = samples.places
            header["samples"] = {
                "distance": samples.distance,
                "usual": samples.usual,
                "count": samples.count,
                "settings": samples.config.to_dict(),
                "fingerprint": samples.fingerprint,
            }
        if (score := self.score) is not None:
            header["score"] = {
                "tau": score.tau,
                "mean": score.mean,
                "std": score.std,
                "count": score.count,
                "settings": score.probe.to_dict(),
                "fingerprint": score.fingerprint,
            }
        if not header:
            raise refuse("calibration", "without any part", f"one of {', '.join(PARTS)} at least", "calibrate first")
        header["captions"] = list(self.captions)
        return save_artefact(path, tensors, KIND, VERSION, header, self._rebuilt)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read such a file."""
        if not Path(path).is_file():
            accepted = "the file that vitrine nemo calibrate wrote"
            raise refuse("calibration file", Path(path).name, accepted, "calibrate first")
        with named(path, "calibration file", "what vitrine nemo calibrate wrote", "calibrate first"):
            return cls._rebuilt(*read_artefact(path, KIND, VERSION))

    @classmethod
    def _rebuilt(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> Calibration:
        parts = {part: dict(header[part]) for part in PARTS if part in header}
        if not parts:
            raise ValueError("a calibration without any part")
        return cls(
            _statistics(tensors, parts["statistics"]) if "statistics" in parts else None,
            _samples(tensors, parts["samples"]) if "samples" in parts else None,
            _score(parts["score"]) if "score" in parts else None,
            tuple(printable(str(text)) for text in list(header.get("captions", ()))[:KEPT_CAPTIONS]),
        )


def _statistics(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> NeuronStatistics:
    means = {k[5:]: v for k, v in tensors.items() if k.startswith("mean/")}
    stds = {k[4:]: v for k, v in tensors.items() if k.startswith("std/")}
    check_pairs(means, stds)
    return NeuronStatistics(means, stds, _count(facts), printable(str(facts["fingerprint"])))


def _samples(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> SampleThreshold:
    distance, usual, places = float(facts["distance"]), float(facts["usual"]), tensors["places"]
    if not 0 < distance < usual < 1e6 or places.shape != (64, 64) or not places.is_floating_point():
        raise ValueError(f"distance {distance}, usual {usual}, places {tuple(places.shape)} of {places.dtype}")
    if not bool(((places >= 0) & places.isfinite()).all()):
        raise ValueError("places that are no squares")
    config = FewStepConfig.from_dict(dict(facts["settings"]))
    return SampleThreshold(distance, usual, places, _count(facts), config, printable(str(facts["fingerprint"])))


def _score(facts: dict[str, Any]) -> ScoreThreshold:
    tau, mean, std = (float(facts[name]) for name in ("tau", "mean", "std"))
    if not all(abs(number) <= 10 for number in (tau, mean, std)):
        raise ValueError(f"tau, mean and std {tau}, {mean}, {std}")
    probe = ProbeConfig.from_dict(dict(facts["settings"]))
    return ScoreThreshold(tau, mean, std, _count(facts), probe, printable(str(facts["fingerprint"])))


def _count(facts: dict[str, Any]) -> int:
    return integer(facts["count"], "captions", LEAST)
