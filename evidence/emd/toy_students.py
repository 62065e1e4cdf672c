"""One-step students of a toy model, by the shipped student's recipe: three parts, each from the part before.

Diff-Instruct has as much time: an update takes it 2.1 s of a core, EMD's 7.4.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.emd import EStepConfig
from ...engine.emd.networks import SCORE
from ...engine.emd.train_config import EMDTrainConfig
from ...engine.errors import refuse
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import open_model

RECIPE: dict[str, Any] = {
    "batch": 16,
    "rank": 32,
    "score_updates": 2,
    "weight": "dmd",
    "auto_gz": False,
    "chain": {"steps": 4, "ge": 0.16, "gz": 0.01, "clip": 20.0},
}
PARTS: tuple[dict[str, Any], ...] = (
    {"steps": 900, "guidance": 3.0, "lr_generator": 3e-4, "lr_score": 1e-3, "ema": 0.99},
    {"steps": 120, "guidance": 2.0, "lr_generator": 2e-4, "lr_score": 1e-3, "ema": 0.95, "decay": 1.0},
    {"steps": 80, "guidance": 1.5, "lr_generator": 1e-4, "lr_score": 1e-3, "ema": 0.95, "decay": 1.0},
)
"""What changes between the parts; the README of the shipped students has the table."""
EMD, DIFF_INSTRUCT = "student", "diff-instruct"
UPDATES_IN_THE_SAME_TIME = 7.4 / 2.1
"""Of Diff-Instruct, for each of EMD's."""
CAPTIONS = range(200_000, 204_096)
"""Scenes whose captions the students are trained on."""
STAGES = tuple(f"{kind}, part {part}" for kind in (EMD, DIFF_INSTRUCT) for part in range(1, len(PARTS) + 1))
"""Names of the parts, in order."""


def student_path(folder: str | Path, kind: str) -> Path:
    """Where the student of a kind is, once trained, in a folder of students."""
    return Path(folder) / f"{kind}.safetensors"


def train_students(
    model: str | None,
    out: str | Path,
    share: float = 1.0,
    progress: Callable[[str], Progress] = lambda name: silent,
) -> Iterator[Path]:
    """Trains a student by EMD and one by Diff-Instruct; the same call resumes. Yields each student's file.

    Args:
        model: the model's folder; None is the shipped portraits.
        out: folder for the students and their runs.
        share: of the recipe's updates.
        progress: name in :data:`STAGES` -> progress of that part.
    """
    if not share > 0:
        raise refuse("share", share, "above 0", "1 is the whole recipe")
    names = iter(STAGES)
    for kind in (EMD, DIFF_INSTRUCT):
        file, start = student_path(out, kind), tuple[Path, ...]()
        for i, part in enumerate(PARTS):
            run = file.with_name(f"{file.stem}-part-{i + 1}")
            start = _part(model, run, _config(kind, part, share), start, progress(next(names)))
        yield Path(shutil.copyfile(start[0], file))


def _config(kind: str, part: dict[str, Any], share: float) -> EMDTrainConfig:
    updates = part["steps"] * share * (UPDATES_IN_THE_SAME_TIME if kind == DIFF_INSTRUCT else 1)
    config = EMDTrainConfig.from_dict(RECIPE | part | {"steps": max(1, round(updates))})
    return replace(config, chain=EStepConfig.diff_instruct()) if kind == DIFF_INSTRUCT else config


def _part(
    model: str | None, run: Path, config: EMDTrainConfig, start: tuple[Path, ...], progress: Progress
) -> tuple[Path, ...]:
    """One part, from the student and the score adapter of the one before; returns both its files."""
    from ...engine.pipelines.emd_training import training_parts

    dataset = open_model(model).dataset
    prompts = dataset.caption(dataset.sample_scenes(CAPTIONS))
    trainer = training_parts(model or "portraits", prompts, dataset.name).trainer(config, run)
    if start:
        trainer.start_from(*start)
    return trainer.run(progress)[0], run / f"{SCORE}_kohya.safetensors"
