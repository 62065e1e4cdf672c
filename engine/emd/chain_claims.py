"""What a longer chain buys on the portraits model, and what it costs: ``vitrine reproduce emd.chain_length``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..claims import ClaimResult, claim
from ..denoiser import Condition
from ..metrics import frechet_distance
from ..progress import Progress, silent
from .config import EStepConfig
from .onestep import seeded
from .roles import GENERATOR
from .train import Trainer
from .train_config import EMDTrainConfig

LENGTHS, LOOKS, SAMPLES, FIRST = (1, 2, 4, 8), (15, 30, 60), 500, 5_100_000
"""Chains, updates after which each student is looked at, captions it is judged on, and their first seed."""


def settings(steps: int) -> EMDTrainConfig:
    """A short run with the shipped student's settings, but for a shorter average and a chain of ``steps``.

    The noise on z is fixed (the calibration rule would give each chain its own), so that only the length differs.
    """
    return EMDTrainConfig(
        LOOKS[-1], 16, rank=32, guidance=3.0, score_updates=2, lr_generator=3e-4, lr_score=1e-3, ema=0.95,
        auto_gz=False, chain=EStepConfig(steps, 0.16, 0.01),
    )  # fmt: skip


@claim(
    "emd.chain_length", paper="Xie et al. 2024 (EM Distillation)",
    figure="quality and time an update by K, the steps of the chain",
    target="after as many updates K = 8 is nearer to real pictures than K = 1",
)  # fmt: skip
def chain_length(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Four students from the teacher, the same batches, 60 updates each; read after 15, 30 and 60."""
    rows: dict[str, dict[str, float]] = {}
    for i, steps in enumerate(LENGTHS):
        rows[f"K = {steps}"] = _run(steps, lambda k, i=i: progress(i * LOOKS[-1] + k, len(LENGTHS) * LOOKS[-1], None))
    last = f"FID after {LOOKS[-1]}"
    best = rows["K = 8"][last]
    return ClaimResult(best, None, best < rows["K = 1"][last], rows)


def _run(steps: int, tick: Any) -> dict[str, float]:
    from ..pipelines.emd_training import training_parts

    parts, row, seconds = training_parts({}), {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            parts.teacher, parts.conditions, parts.shape, settings(steps), Path(folder), parts.null, parts.contract
        )
        while trainer.done < LOOKS[-1]:
            start = time.perf_counter()
            trainer.step()
            seconds += time.perf_counter() - start
            if trainer.done in LOOKS:
                row[f"FID after {trainer.done}"] = round(_distance(trainer, parts), 1)
            tick(trainer.done)
    return row | {"seconds an update": round(seconds / LOOKS[-1], 2)}


def _distance(trainer: Trainer, parts: Any) -> float:
    """Frechet distance on readout features: averaged student against twice as many renders of other scenes."""
    from ..portraits import caption, render, sample_scenes
    from ..portraits.readout import load_readout, read

    net, pipe = load_readout(), parts.pipeline
    prompts = caption(sample_scenes(range(FIRST, FIRST + SAMPLES)))
    real = read(net, render(sample_scenes(range(FIRST + SAMPLES, FIRST + 3 * SAMPLES))).images).features
    drawn = []
    with torch.no_grad(), trainer.roles.holding(GENERATOR, trainer.ema):
        for start in range(0, SAMPLES, 50):
            seeds = list(range(start, start + 50))
            text = pipe.encode_prompt(prompts[start : start + 50], "cpu", 1, False)[0]
            drawn.append(parts.decode(trainer.generate(seeded(seeds, parts.shape), Condition(text))))
    return frechet_distance(read(net, torch.cat(drawn)).features, real)
