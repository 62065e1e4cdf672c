"""What a longer chain buys on the portraits model, and what it costs: ``vitrine reproduce emd.chain_length``."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ...engine.emd.config import EStepConfig
from ...engine.emd.roles import GENERATOR
from ...engine.emd.train import Trainer
from ...engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .judge import QUICK_DISTANCE, QUICK_SAMPLES, Judge

FIRST = 5_100_000
"""First seed of the captions the students are judged on."""


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        lengths: K of each student's chain.
        looks: updates after which each student is judged.
        batch: rows of an update.
        samples: captions it is judged on.
    """

    lengths: tuple[int, ...] = (1, 2, 4, 8)
    looks: tuple[int, ...] = (15, 30, 60)
    batch: int = 16
    samples: int = 1000


FULL, QUICK = Plan(), Plan((1, 8), (8,), 4, QUICK_SAMPLES)


def settings(steps: int, plan: Plan = FULL) -> EMDTrainConfig:
    """A short run with the shipped student's settings, but for a shorter average and a chain of ``steps``.

    The step size of z is fixed (the calibration rule would give each chain its own), so that only the length differs.
    """
    return EMDTrainConfig(
        plan.looks[-1], plan.batch, rank=32, guidance=1.5, score_updates=2, lr_generator=3e-4, lr_score=1e-3,
        chain=EStepConfig(steps, 0.16, 0.01), advanced=EMDAdvancedConfig(False, "dmd", 0.95),
    )  # fmt: skip


@claim(
    "emd.chain_length", paper="Xie et al. 2024 (EM Distillation)",
    figure="quality and time an update by K, the steps of the chain",
    target="after as many updates K = 8 is nearer to real pictures than K = 1", minutes=40, quick_minutes=0.7,
)  # fmt: skip
def chain_length(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Four students from the teacher, the same batches, 60 updates each; read after 15, 30 and 60.

    One seed and no interval: differences of a tenth or two between neighbours say nothing.

    They take turns, and the time is the median update's, so that other work on the machine slows all alike. Quick: two
    students, 8 updates of 4 rows, 100 captions; that shows what a longer chain costs, and that it is not worse by more
    than chance.
    """
    plan = QUICK if quick else FULL
    judge = Judge.open(FIRST, plan.samples, model)
    with tempfile.TemporaryDirectory() as folder:
        students = {f"K = {k}": _trainer(k, plan, Path(folder) / str(k), model) for k in plan.lengths}
        rows = _train_and_judge(students, plan, judge, progress)
    last = f"FID after {plan.looks[-1]}"
    shortest, longest = (rows[f"K = {k}"][last] for k in (plan.lengths[0], plan.lengths[-1]))
    if quick:
        interval = (longest - QUICK_DISTANCE, longest + QUICK_DISTANCE)
        return ClaimResult(longest, interval, longest < shortest + QUICK_DISTANCE, rows)
    return ClaimResult(longest, None, longest < shortest, rows)


def _train_and_judge(
    students: dict[str, Trainer], plan: Plan, judge: Judge, progress: Progress
) -> dict[str, dict[str, float]]:
    """Frechet distances after the updates in ``looks``, and the seconds an update, of each student."""
    rows: dict[str, dict[str, float]] = {name: {} for name in students}
    seconds: dict[str, list[float]] = {name: [] for name in students}
    for done in range(1, plan.looks[-1] + 1):
        for name, trainer in students.items():
            start = time.perf_counter()
            trainer.step()
            seconds[name].append(time.perf_counter() - start)
            if done in plan.looks:
                with trainer.roles.with_weights(GENERATOR, trainer.average.values):
                    rows[name][f"FID after {done}"] = round(judge.distance(judge.draw(trainer.generate)[0]), 2)
        progress(done, plan.looks[-1], None)
    for name, row in rows.items():
        row["seconds an update"] = round(statistics.median(seconds[name]), 2)
    return rows


def _trainer(steps: int, plan: Plan, folder: Path, model: str | None) -> Trainer:
    from ...engine.pipelines.emd_training import PORTRAIT_SCENES, PORTRAITS, training_parts
    from ...engine.portraits import caption, sample_scenes

    prompts = None if model is None else caption(sample_scenes(PORTRAIT_SCENES))
    return training_parts(model or PORTRAITS, prompts).trainer(settings(steps, plan), folder)
