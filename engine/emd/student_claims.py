"""What the shipped one-step student is worth: ``vitrine reproduce emd.student``."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..claims import ClaimResult, claim
from ..denoiser import Condition, Denoiser
from ..metrics import frechet_distance, precision_recall
from ..progress import Progress, silent
from .contract import StudentContract
from .onestep import one_step, seeded
from .students import one_step_pipeline

PAPER = "Xie et al. 2024 (EM Distillation)"
COUNT, FIRST = 1000, 5_000_000
"""Captions of scenes that training never saw; twice as many renders of other scenes are the reference. With fewer
samples the Frechet distance is mostly the bias of small sets: real against real gives 4.5 at 500 and 2.0 at 1,000."""


@claim(
    "emd.student", paper=PAPER, figure="Table 1: one step close to the many-step teacher (FID on readout features)",
    target="FID <= 1.5 x the teacher's at 30 steps and >= 3 x better than its single step; recall >= Diff-Instruct's; "
    "agreement >= 90 % of the teacher's",
)  # fmt: skip
def student(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Teacher with 30 steps and with one, Diff-Instruct and EMD with one, on the same 500 captions and seeds."""
    from ..portraits import caption, render, sample_scenes
    from ..portraits.readout import attribute_accuracy, load_readout, read

    scenes, net = sample_scenes(range(FIRST, FIRST + COUNT)), load_readout()
    others = sample_scenes(range(FIRST + COUNT, FIRST + 3 * COUNT))
    real = read(net, render(others).images).features
    rows: dict[str, dict[str, float]] = {}
    for name, images, seconds in _samples(caption(scenes), model, progress):
        reading = read(net, images)
        accuracy = attribute_accuracy(reading, scenes)
        precision, recall = precision_recall(real, reading.features)
        rows[name] = {
            "FID": round(frechet_distance(reading.features, real), 2),
            "precision": round(precision, 3),
            "recall": round(recall, 3),
            "agreement": round(sum(accuracy.values()) / len(accuracy), 4),
            "ms an image": round(1000 * seconds / COUNT, 1),
        }
    ours, many, once = rows["EMD, 1 step"], rows["teacher, 30 steps"], rows["teacher, 1 step"]
    fresh = sample_scenes(range(FIRST + 3 * COUNT, FIRST + 4 * COUNT))
    floor = frechet_distance(read(net, render(fresh).images).features, real)
    rows["real against real"] = {"FID": round(floor, 2)}
    holds = ours["FID"] <= 1.5 * many["FID"] and 3 * ours["FID"] <= once["FID"]
    holds = holds and ours["recall"] >= rows["Diff-Instruct, 1 step"]["recall"]
    holds = holds and ours["agreement"] >= 0.9 * many["agreement"]
    return ClaimResult(ours["FID"], None, holds, rows)


def _samples(prompts: list[str], model: str | None, progress: Progress) -> Any:
    """(name, (N, 3, 64, 64) pictures in [0, 1], seconds in the denoiser) of each way to sample."""
    from ..portraits import load_portraits
    from ..portraits.sampling import decode, sample_latents

    portraits, seeds = load_portraits(model), list(range(len(prompts)))
    with torch.no_grad():
        text = torch.cat([portraits.encode(prompts[i : i + 50]) for i in range(0, len(prompts), 50)])
    start = time.perf_counter()
    parts = []
    for i in range(0, len(prompts), 50):
        parts.append(sample_latents(portraits, prompts[i : i + 50], seeds[i : i + 50]))
        progress(i + 50, 4 * len(prompts), None)
    yield "teacher, 30 steps", decode(portraits, torch.cat(parts)), time.perf_counter() - start
    teacher = Denoiser.from_diffusers(portraits.unet, portraits.scheduler)
    yield "teacher, 1 step", *_once(portraits, teacher, text, seeds, StudentContract())
    for name, file in (("Diff-Instruct, 1 step", "diff-instruct"), ("EMD, 1 step", "student")):
        pipe, contract = one_step_pipeline(file)
        yield name, *_once(portraits, Denoiser.from_diffusers(pipe), text, seeds, contract)


@torch.no_grad()
def _once(
    portraits: Any, net: Denoiser, text: torch.Tensor, seeds: list[int], contract: StudentContract
) -> tuple[torch.Tensor, float]:
    from ..portraits.sampling import decode

    start, parts = time.perf_counter(), []
    for i in range(0, len(seeds), 50):
        parts.append(one_step(net, seeded(seeds[i : i + 50], (4, 16, 16)), Condition(text[i : i + 50]), contract))
    seconds = time.perf_counter() - start
    return decode(portraits, torch.cat(parts)), seconds
