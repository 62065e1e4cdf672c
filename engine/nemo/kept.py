"""Scores of a long list of prompts so far, in a file from which the same call goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import refuse
from ..files import read_artefact, save_artefact
from .score import Score

KIND, VERSION = "vitrine-nemo-scores", 1


def keep_scores(path: str | Path, identity: str, scores: Sequence[Score]) -> None:
    """Write the scores so far, whole or not at all; ``identity`` stands for the prompts, the model and the probe."""
    save_artefact(path, {"per_seed": torch.stack([s.per_seed for s in scores])}, KIND, VERSION, {"identity": identity})


def kept_scores(path: str | Path, identity: str, tau: float | None) -> list[Score]:
    """What :func:`keep_scores` wrote; nothing where there is no file.

    Raises:
        VitrineError: If the file is damaged, or belongs to other prompts, another model or another probe.
    """
    if not Path(path).is_file():
        return []
    tensors, header = read_artefact(path, KIND, VERSION)
    if header["identity"] != identity:
        accepted = "the scores of these prompts on this model"
        raise refuse("state", Path(path).name, accepted, "choose another file, or delete this one to begin anew")
    return [Score(row, tau) for row in tensors["per_seed"]]
