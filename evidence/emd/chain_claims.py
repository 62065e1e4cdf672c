"""What a longer chain buys on the portraits model, and what it costs: ``vitrine reproduce emd.chain_length``."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from ...engine.emd.config import EStepConfig
from ...engine.emd.roles import GENERATOR
from ...engine.emd.train import Trainer
from ...engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .judge import Judge

LENGTHS, LOOKS, SAMPLES, FIRST = (1, 2, 4, 8), (15, 30, 60), 1000, 5_100_000
"""Chains, updates after which each student is looked at, captions it is judged on, and their first seed."""


def settings(steps: int) -> EMDTrainConfig:
    """A short run with the shipped student's settings, but for a shorter average and a chain of ``steps``.

    The noise on z is fixed (the calibration rule would give each chain its own), so that only the length differs.
    """
    return EMDTrainConfig(
        LOOKS[-1], 16, rank=32, guidance=1.5, score_updates=2, lr_generator=3e-4, lr_score=1e-3,
        chain=EStepConfig(steps, 0.16, 0.01), advanced=EMDAdvancedConfig(ema=0.95, auto_gz=False),
    )  # fmt: skip


@claim(
    "emd.chain_length", paper="Xie et al. 2024 (EM Distillation)",
    figure="quality and time an update by K, the steps of the chain",
    target="after as many updates K = 8 is nearer to real pictures than K = 1",
)  # fmt: skip
def chain_length(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Four students from the teacher, the same batches, 60 updates each; read after 15, 30 and 60.

    They take turns, and the time is the median update's, so that other work on the machine slows all alike.
    """
    judge = Judge.open(FIRST, SAMPLES, model)
    rows: dict[str, dict[str, float]] = {f"K = {k}": {} for k in LENGTHS}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        students = {f"K = {k}": _trainer(k, Path(folder) / str(k), model) for k in LENGTHS}
        for done in range(1, LOOKS[-1] + 1):
            for name, trainer in students.items():
                start = time.perf_counter()
                trainer.step()
                seconds[name].append(time.perf_counter() - start)
                if done in LOOKS:
                    with trainer.roles.with_weights(GENERATOR, trainer.average.values):
                        rows[name][f"FID after {done}"] = round(judge.distance(judge.draw(trainer.generate)[0]), 2)
            progress(done, LOOKS[-1], None)
    for name, row in rows.items():
        row["seconds an update"] = round(statistics.median(seconds[name]), 2)
    last = f"FID after {LOOKS[-1]}"
    best = rows[f"K = {LENGTHS[-1]}"][last]
    return ClaimResult(best, None, best < rows[f"K = {LENGTHS[0]}"][last], rows)


def _trainer(steps: int, folder: Path, model: str | None) -> Trainer:
    from ...engine.pipelines.emd_training import PORTRAIT_SCENES, PORTRAITS, training_parts
    from ...engine.portraits import caption, sample_scenes

    prompts = None if model is None else caption(sample_scenes(PORTRAIT_SCENES))
    return training_parts(model or PORTRAITS, prompts).trainer(settings(steps), folder)
