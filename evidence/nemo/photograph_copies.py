"""The copy check on LoRAs of one, five and twenty photographed objects: ``nemo.copy_check.photographs``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from ...engine.runtime.progress import Progress, silent
from ..photograph_folder import FOLDER, Cutout, composed, read_cutouts
from ..registry import ClaimResult, claim
from .copy_claims import SIZES, SampleBudget, TrainingSet, measured

BACKGROUNDS = 8_200_000
"""First seed of the backgrounds."""


@claim(
    "nemo.copy_check.photographs",
    paper="NeMo's score (Hintersdorf et al., NeurIPS 2024) on LoRAs; copies after Gu et al. 2023",
    figure="LoRAs of 1, 5 and 20 photographed objects (tuxpaint-stamps-default): rank correlation of the score, which "
    "sees no photograph, with the copies",
    target="Spearman's rho >= 0.6 over LoRAs, and more than the same model's without the LoRA",
    minutes=8,
    quick_minutes=1.5,
)
def copies_of_photographs(
    model: str | None = None, progress: Progress = silent, quick: bool = False, photographs: str | None = None
) -> ClaimResult:
    """Recipe, scores and settings as in ``nemo.copy_check``; a group's three LoRAs share their first objects."""
    cutouts = read_cutouts(Path(photographs) if photographs else FOLDER)
    budget = SampleBudget(2, 4, 4) if quick else SampleBudget()
    sets = []
    for group in range(budget.people):
        objects = cutouts[group :: budget.people]  # evenly spaced: neighbours by name are in other groups
        sets += [_set(f"objects-{group}-of-{size}", objects[:size], group) for size in SIZES]
    return measured(sets, budget, model, progress, quick)


def _set(name: str, objects: tuple[Cutout, ...], group: int) -> TrainingSet:
    first = BACKGROUNDS + 100 * group
    pictures = composed(torch.stack([each.rgba for each in objects]), range(first, first + len(objects)))
    small = F.interpolate(pictures, (64, 64), mode="bilinear", antialias=True).clamp(0, 1)
    return TrainingSet(name, small, [each.caption for each in objects], group)
