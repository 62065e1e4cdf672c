"""One-step students of another toy model, by the shipped student's recipe: three parts, each from the part before.

Diff-Instruct has as much time: an update takes it 2.1 s of a core, EMD's 7.4.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.emd.chain_config import EStepConfig
from ...engine.emd.networks import SCORE
from ...engine.emd.train_config import EMDTrainConfig
from ...engine.errors import refuse
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import open_model

RECIPE: dict[str, Any] = {
    "batch": 16, "rank": 32, "score_updates": 2, "weight": "dmd", "meter_every": 100, "auto_gz": False,
    "chain": {"steps": 4, "ge": 0.16, "gz": 0.01, "clip": 20.0},
}  # fmt: skip
PARTS: tuple[dict[str, Any], ...] = (
    {"steps": 900, "guidance": 3.0, "lr_generator": 3e-4, "lr_score": 1e-3, "ema": 0.99},
    {"steps": 120, "guidance": 2.0, "lr_generator": 2e-4, "lr_score": 1e-3, "ema": 0.95, "decay": 1.0},
    {"steps": 80, "guidance": 1.5, "lr_generator": 1e-4, "lr_score": 1e-3, "ema": 0.95, "decay": 1.0},
)
"""What changes between the parts; the README of the shipped students has the table."""
EMD, DIFF_INSTRUCT = "student", "diff-instruct"
STAGES = tuple(f"{kind}, part {i + 1}" for kind in (EMD, DIFF_INSTRUCT) for i in range(len(PARTS)))
AS_MUCH_TIME = 7.4 / 2.1
CAPTIONS = range(200_000, 204_096)
"""Scenes whose captions the students are trained on."""
BASE = "avataaars"


def student_path(folder: str | Path, kind: str) -> Path:
    """Where a model's student of a kind is, once trained."""
    return Path(folder) / "students" / f"{kind}.safetensors"


def train_students(
    folder: str | Path, share: float = 1.0, progress: Callable[[str], Progress] = lambda name: silent
) -> Iterator[Path]:
    """Trains EMD, then Diff-Instruct; the same call resumes. Yields each student's file.

    Args:
        folder: of the model; runs are in its subfolder ``students``.
        share: of the recipe's updates.

    Raises:
        VitrineError: If the share is not above 0, or the folder is none of a model.
    """
    if not share > 0:
        raise refuse("share", share, "above 0", "1 is the whole recipe")
    stages = iter(STAGES)
    for kind in (EMD, DIFF_INSTRUCT):
        start: tuple[Path, ...] = ()
        for i, part in enumerate(PARTS):
            run = student_path(folder, kind).with_name(f"{kind}-part-{i + 1}")
            start = _part(Path(folder), run, _config(kind, part, share), start, progress(next(stages)))
        yield Path(shutil.copyfile(start[0], student_path(folder, kind)))


def _config(kind: str, part: dict[str, Any], share: float) -> EMDTrainConfig:
    updates = part["steps"] * share * (1 if kind == EMD else AS_MUCH_TIME)
    config = EMDTrainConfig.from_dict(RECIPE | part | {"steps": max(1, round(updates))})
    return config if kind == EMD else replace(config, chain=EStepConfig.diff_instruct())


def _part(
    folder: Path, run: Path, config: EMDTrainConfig, start: tuple[Path, ...], progress: Progress
) -> tuple[Path, ...]:
    """One part, from the student and the score adapter of the one before; returns both its files."""
    from ...engine.pipelines.emd_training import training_parts

    dataset = open_model(folder).dataset
    prompts = dataset.caption(dataset.sample_scenes(CAPTIONS))
    trainer = training_parts(str(folder), prompts, BASE).trainer(config, run)
    if start:
        trainer.start_from(*start)
    return trainer.run(progress)[0], run / f"{SCORE}_kohya.safetensors"
