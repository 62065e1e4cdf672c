"""A one-step student of the flow portraits against its teacher: ``python -m vitrine.evidence.emd.flow_one_step FILE``.

FILE is the student's, from ``vitrine emd train`` with :data:`RECIPE`. Pictures are read at 64 pixels by the readout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import interpolate

from ...engine.pipelines.emd import EMDOneStepPipeline
from ...engine.portraits import caption, render, sample_scenes
from ...engine.portraits.flow import load_flow_portraits
from ...engine.progress import Progress, silent
from ..metrics import frechet_distance, precision_recall
from ..portraits.readout import attribute_accuracy, load_readout, read
from ..portraits.sampling import decode, sample_latents

RECIPE: dict[str, Any] = {
    "model": "flow portraits", "base": "flow portraits",
    "train": {
        "steps": 100, "batch": 8, "rank": 16, "guidance": 3.0, "score_updates": 2, "ema": 0.98, "lr_generator": 2e-4,
        "lr_score": 5e-4, "weight": "dmd", "auto_gz": False,
        "chain": {"steps": 2, "ge": 0.16, "gz": 0.01, "clip": 20.0},
    },
}  # fmt: skip
"""The training file; none of it was tuned."""
FIRST, BATCH = 7_330_000, 20
"""First of the scenes whose captions are drawn; the next twice as many are the real pictures."""


@torch.no_grad()
def judged(
    student: str | Path | None, count: int = 100, steps: tuple[int, ...] = (4, 30), progress: Progress = silent
) -> dict[str, dict[str, float]]:
    """Name of a way to draw -> Frechet distance to renders, precision, recall, agreement with the prompts.

    Args:
        student: its file; None draws the teacher alone.
        count: prompts, each with one picture; the same seeds for all.
        steps: of the teacher, with guidance 3, beside its single step.
    """
    model, net = load_flow_portraits(), load_readout()
    scenes = sample_scenes(range(FIRST, FIRST + count))
    prompts, seeds = caption(scenes), list(range(count))
    other = sample_scenes(range(FIRST + count, FIRST + 3 * count))
    real = read(net, render(other).images).features

    def row(draw: Callable[[list[str], list[int]], torch.Tensor]) -> dict[str, float]:
        parts = [draw(prompts[i : i + BATCH], seeds[i : i + BATCH]) for i in range(0, count, BATCH)]
        reading = read(net, interpolate(torch.cat(parts), (64, 64), mode="area"))
        shown, (precision, recall) = attribute_accuracy(reading, scenes), precision_recall(real, reading.features)
        distance = frechet_distance(reading.features, real)
        rounded = {"Frechet": distance, "precision": precision, "recall": recall}
        rounded["agreement"] = sum(shown.values()) / len(shown)
        return {name: round(value, 3) for name, value in rounded.items()}

    def sampled(number: int, texts: list[str], own: list[int]) -> torch.Tensor:
        return decode(model, sample_latents(model, texts, own, steps=number))

    pipe = EMDOneStepPipeline.from_pipe(model.pipeline())
    ways: dict[str, Callable[[list[str], list[int]], torch.Tensor]] = {
        "teacher, 1 step": lambda p, s: pipe(p, s, output_type="pt").images,
        **{f"teacher, {n} steps": partial(sampled, n) for n in steps},
    }  # fmt: skip
    rows = {}
    for done, (name, draw) in enumerate(ways.items()):
        rows[name] = row(draw)
        progress(done + 1, len(ways), None)
    half = read(net, render(sample_scenes(range(FIRST + 3 * count, FIRST + 4 * count))).images).features
    rows["renders of other scenes"] = {"Frechet": round(frechet_distance(half, real), 3)}
    if student is not None:
        contract = pipe.load_student(student, base="flow portraits")
        rows["student, 1 step"] = row(lambda p, s: pipe(p, s, contract, output_type="pt").images)
    return rows


if __name__ == "__main__":
    for name, figures in judged(sys.argv[1]).items():
        print(name, figures)
