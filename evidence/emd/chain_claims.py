"""Quality and cost of longer chains on the portraits model: ``vitrine reproduce emd.chain_length``."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ...engine.emd import EStepConfig
from ...engine.emd.emd_trainer import Trainer
from ...engine.emd.networks import GENERATOR
from ...engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, arms, claim
from .judge import QUICK_DISTANCE, QUICK_SAMPLES, Judge
from .mixture_claims import spread

FIRST_SCENE = 5_100_000
"""First scene whose caption the students are evaluated on."""


class Plan(NamedTuple):
    """Size of the measurement.

    Attributes:
        lengths: K of each student's chain.
        looks: updates after which each student is evaluated.
        batch: samples per update.
        samples: captions in the evaluation.
        seeds: of the training: initial weights, noise and caption order.
    """

    lengths: tuple[int, ...] = (1, 4, 8)
    looks: tuple[int, ...] = (30, 60)
    batch: int = 16
    samples: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)


FULL, QUICK = Plan(), Plan((1, 8), (8,), 4, QUICK_SAMPLES, (0,))


def settings(steps: int, plan: Plan = FULL, seed: int = 0) -> EMDTrainConfig:
    """A short run with the shipped student's settings, but for a shorter average and a chain of ``steps``.

    The step size of z is fixed (the calibration rule would give each chain its own), so that only the length differs.
    """
    return EMDTrainConfig(
        plan.looks[-1], plan.batch, rank=32, guidance=1.5, score_updates=2, lr_generator=3e-4, lr_score=1e-3,
        chain=EStepConfig(steps, 0.16, 0.01), seed=seed, advanced=EMDAdvancedConfig(False, "dmd", 0.95),
    )  # fmt: skip


@claim(
    "emd.chain_length", paper="Xie et al. 2024 (EM Distillation)",
    figure="quality and time an update by K, the steps of the chain",
    target="after as many updates K = 8 is nearer to real pictures than K = 1, at 95 % over three seeds",
    minutes=45, quick_minutes=0.7,
)  # fmt: skip
def chain_length(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Three students from the teacher, 60 updates each, trained with three seeds; evaluated after 30 and 60.

    Students of one seed see the same batches, so differences are paired. Students of a seed alternate, and the time is
    the median update's, so that other load on the machine affects all equally. Quick: two students of one seed, 8
    updates of 4 samples, 100 captions; this shows the cost of a longer chain, and that it is not significantly worse.
    """
    plan = QUICK if quick else FULL
    judge = Judge.open(FIRST_SCENE, plan.samples, model)
    distances: dict[int, list[list[float]]] = {k: [] for k in plan.lengths}
    seconds: dict[int, list[float]] = {k: [] for k in plan.lengths}
    updates = plan.looks[-1]
    for number, seed in enumerate(plan.seeds):
        with tempfile.TemporaryDirectory() as folder:
            students = {k: _trainer(k, plan, Path(folder) / str(k), model, seed) for k in plan.lengths}
            for of_seeds in distances.values():
                of_seeds.append([])
            for done in range(1, updates + 1):
                for k, trainer in students.items():
                    start = time.perf_counter()
                    trainer.step()
                    seconds[k].append(time.perf_counter() - start)
                    if done in plan.looks:
                        with trainer.roles.with_weights(GENERATOR, trainer.average.values):
                            distances[k][-1].append(judge.distance(judge.draw(trainer.generate)[0]))
                progress(number * updates + done, len(plan.seeds) * updates, None)
    return _result(plan, distances, seconds)


def _result(plan: Plan, distances: dict[int, list[list[float]]], seconds: dict[int, list[float]]) -> ClaimResult:
    """Distances by K and seed, and each chain's minus the shortest one's, paired, with 95 % intervals over seeds."""
    rows: dict[str, dict] = {}
    for k in plan.lengths:
        looks = zip(plan.looks, zip(*distances[k], strict=True), strict=True)
        rows[f"K = {k}"] = {f"FID after {look}": [round(d, 2) for d in values] for look, values in looks}
        rows[f"K = {k}"]["seconds an update"] = round(statistics.median(seconds[k]), 2)
    shortest, longest = plan.lengths[0], plan.lengths[-1]
    last = {k: [row[-1] for row in distances[k]] for k in plan.lengths}
    roles = {f"K = {k}": "rival" for k in plan.lengths} | {f"K = {longest}": "ours", f"K = {shortest}": "trivial"}
    means = arms({f"K = {k}": statistics.fmean(values) for k, values in last.items()}, roles)
    if len(plan.seeds) == 1:
        value = last[longest][0]
        interval = (value - QUICK_DISTANCE, value + QUICK_DISTANCE)
        holds = value < last[shortest][0] + QUICK_DISTANCE
        return ClaimResult(value, interval, holds, rows, arms=means, n=plan.samples)
    for k in plan.lengths[1:]:
        apart = spread([a - b for a, b in zip(last[k], last[shortest], strict=True)])
        rows[f"K = {k} minus K = {shortest}"] = {f"FID after {plan.looks[-1]}, paired": apart}
    mean, half = apart["mean"], apart["+-"]
    table = tuple((name, ", ".join(map(str, row[f"FID after {plan.looks[-1]}"])), row["seconds an update"])
                  for name, row in rows.items() if "seconds an update" in row)  # fmt: skip
    return ClaimResult(
        mean,
        (mean - half, mean + half),
        mean + half < 0,
        rows,
        arms=means,
        n=plan.samples,
        seeds=len(plan.seeds),
        tables=(Table("By training seed", ("chain", "Frechet distance", "seconds an update"), table),),
    )


def _trainer(steps: int, plan: Plan, folder: Path, model: str | None, seed: int) -> Trainer:
    from ...engine.pipelines.emd_training import PORTRAIT_SCENES, PORTRAITS, training_parts
    from ...engine.portraits import caption, sample_scenes

    prompts = None if model is None else caption(sample_scenes(PORTRAIT_SCENES))
    return training_parts(model or PORTRAITS, prompts).trainer(settings(steps, plan, seed), folder)
