"""Scores of a long list of prompts so far, from which the same call resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..jobs.run import Run
from .few_step_detection import Agreement, usual_places
from .noise_similarity import Score
from .sample_threshold import SampleThreshold
from .search_config import FewStepConfig


def keep_scores(run: Run, scores: Sequence[Score]) -> None:
    """Write the scores so far, whole or not at all."""
    run.save({"scores": {"per_seed": torch.stack([s.per_seed for s in scores])}})


def kept_scores(run: Run, tau: float | None) -> list[Score]:
    """What :func:`keep_scores` wrote; nothing where nothing was."""
    state = run.load()
    return [] if state is None else [Score(row, tau) for row in state.tensors["scores"]["per_seed"]]


def keep_agreements(run: Run, agreements: Sequence[Agreement]) -> None:
    """Write the agreements so far but for their samples; pairs that two stages left out are NaN."""
    pairs = torch.nn.utils.rnn.pad_sequence([a.distances for a in agreements], True, torch.nan)
    areas = torch.tensor([a.area for a in agreements])
    run.save({"agreements": {"distances": pairs, "areas": areas}})


def kept_agreements(run: Run, config: FewStepConfig, threshold: SampleThreshold | None) -> list[Agreement]:
    """What :func:`keep_agreements` wrote; nothing where nothing was. Errors are those of :func:`kept_scores`."""
    state = run.load()
    if state is None:
        return []
    kept = state.tensors["agreements"]
    rows = zip(kept["distances"], kept["areas"].tolist(), strict=True)
    return [Agreement(pairs[pairs == pairs], config, threshold, area=area) for pairs, area in rows]


@dataclass
class UsualSamples:
    """How far samples of ordinary captions differ, so far.

    Attributes:
        distances: of each caption.
        places: (64, 64) sum of :func:`~vitrine.engine.nemo.few_step_detection.usual_places`.
    """

    distances: list[float] = field(default_factory=list)
    places: torch.Tensor = field(default_factory=lambda: torch.zeros(64, 64))

    @classmethod
    def resumed(cls, run: Run) -> UsualSamples:
        """What :meth:`keep` wrote; empty where nothing was. Errors are those of :func:`kept_scores`."""
        state = run.load()
        if state is None:
            return cls()
        kept = state.tensors["usual"]
        return cls(kept["distances"].tolist(), kept["places"])

    @classmethod
    def joined(cls, parts: Sequence[UsualSamples]) -> UsualSamples:
        """Those of several processes."""
        distances = [distance for part in parts for distance in part.distances]
        return cls(distances, torch.stack([part.places for part in parts]).sum(0))

    def add(self, agreements: Sequence[Agreement]) -> None:
        """Further captions, with their samples."""
        self.distances += [agreement.distance for agreement in agreements]
        self.places = self.places + usual_places(agreements)

    def keep(self, run: Run) -> None:
        """Write it, whole or not at all."""
        run.save({"usual": {"distances": torch.tensor(self.distances), "places": self.places}})

    def threshold(self, config: FewStepConfig, fingerprint: str) -> SampleThreshold:
        """The threshold, see :meth:`~vitrine.engine.nemo.sample_threshold.SampleThreshold.of`."""
        positions = self.places / max(1, len(self.distances))
        return SampleThreshold.of(self.distances, positions, config, fingerprint)
