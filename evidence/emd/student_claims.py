"""What the shipped one-step student is worth: ``vitrine reproduce emd.student``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...engine.denoiser import Denoiser
from ...engine.emd.contract import StudentContract
from ...engine.emd.onestep import one_step
from ...engine.pipelines.emd import one_step_pipeline
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .judge import BATCH, Generate, Judge

PAPER = "Xie et al. 2024 (EM Distillation)"
COUNT, FIRST = 1000, 5_000_000
STUDENTS = {"Diff-Instruct, 1 step": "diff-instruct", "EMD, 1 step": "student"}
SETS, APART = 4, 10_000
"""Recall is the mean over sets of captions: on one of 1,000 it is uncertain by 0.004."""


@claim(
    "emd.student", paper=PAPER, figure="Table 1: one step close to the many-step teacher (FID on readout features)",
    target="FID <= 1.5 x the teacher's at 30 steps and >= 3 x better than its single step; recall >= Diff-Instruct's; "
    "agreement >= 90 % of the teacher's",
)  # fmt: skip
def student(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Teacher with 30 steps and with one, Diff-Instruct and EMD with one, on the same captions and seeds."""
    from ...engine.portraits import render, sample_scenes

    judge, once = Judge.open(FIRST, COUNT, model), _students()
    drawn = _samples(judge, once, progress)
    rows: dict[str, dict[str, Any]] = {name: judge.row(images, seconds) for name, images, seconds in drawn}
    recall = _recalls(rows, once, model, progress)
    ours, many, single = (rows[k] for k in ("EMD, 1 step", "teacher, 30 steps", "teacher, 1 step"))
    fresh = render(sample_scenes(range(FIRST + 3 * COUNT, FIRST + 4 * COUNT))).images
    rows["real against real"] = {"FID": round(judge.distance(fresh), 2)}
    holds = ours["FID"] <= 1.5 * many["FID"] and 3 * ours["FID"] <= single["FID"]
    holds = holds and recall["EMD, 1 step"] >= recall["Diff-Instruct, 1 step"]
    holds = holds and ours["agreement"] >= 0.9 * many["agreement"]
    return ClaimResult(ours["FID"], None, holds, rows)


def _students() -> dict[str, Generate]:
    return {
        name: _once(Denoiser.from_diffusers(pipe), contract)
        for name, (pipe, contract) in ((name, one_step_pipeline(file)) for name, file in STUDENTS.items())
    }


def _recalls(
    rows: dict[str, dict[str, Any]], once: dict[str, Generate], model: str | None, progress: Progress
) -> dict[str, float]:
    """Mean recall of each student; ``rows`` hold the first set's and get all of them."""
    found = {name: [rows[name]["recall"]] for name in once}
    for k in range(1, SETS):
        judge = Judge.open(FIRST + k * APART, COUNT, model)
        for name, generate in once.items():
            found[name].append(judge.row(*judge.draw(generate))["recall"])
        progress((1 + k) * COUNT, SETS * COUNT, None)
    for name, values in found.items():
        rows[name] |= {"mean recall": round(sum(values) / SETS, 4), "recall on each set": values}
    return {name: rows[name]["mean recall"] for name in found}


def _samples(judge: Judge, once: dict[str, Generate], progress: Progress) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(name, (N, 3, 64, 64) pictures in [0, 1], seconds in the denoiser) of each way to sample."""
    from ..portraits.sampling import decode, sample_latents

    portraits, start, parts = judge.portraits, time.perf_counter(), []
    for i in range(0, COUNT, BATCH):
        parts.append(sample_latents(portraits, judge.prompts[i : i + BATCH], list(range(i, i + BATCH))))
        progress(i + BATCH, SETS * COUNT, None)
    yield "teacher, 30 steps", decode(portraits, torch.cat(parts)), time.perf_counter() - start
    teacher = Denoiser.from_diffusers(portraits.unet, portraits.scheduler)
    yield "teacher, 1 step", *judge.draw(_once(teacher, StudentContract()))
    for name, generate in once.items():
        yield name, *judge.draw(generate)


def _once(net: Denoiser, contract: StudentContract) -> Generate:
    return partial(one_step, net, contract=contract)
