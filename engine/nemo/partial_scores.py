"""Scores of a long list of prompts so far, from which the same call goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..jobs.run import Run
from .noise_similarity import Score


def keep_scores(run: Run, scores: Sequence[Score]) -> None:
    """Write the scores so far, whole or not at all."""
    run.save({"scores": {"per_seed": torch.stack([s.per_seed for s in scores])}})


def kept_scores(run: Run, tau: float | None) -> list[Score]:
    """What :func:`keep_scores` wrote; nothing where nothing was.

    Raises:
        VitrineError: If the state is damaged, or belongs to other prompts, another model or another probe.
    """
    state = run.load()
    return [] if state is None else [Score(row, tau) for row in state.tensors["scores"]["per_seed"]]
