"""Quality of the shipped one-step student: ``vitrine reproduce emd.student``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.emd import StudentPreset, one_step
from ...engine.errors import refuse
from ...engine.pipelines.emd import one_step_pipeline
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import avataaars_folder
from ..registry import ClaimResult, Table, arms, claim
from .judge import BATCH, QUICK_DISTANCE, QUICK_RECALL, QUICK_SAMPLES, Generate, Judge
from .mixture_claims import spread
from .toy_students import student_path

PAPER = "Xie et al. 2024 (EM Distillation)"
CAPTION_COUNT, FIRST_SCENE = 1000, 5_000_000
STUDENTS = {"Diff-Instruct, 1 step": "diff-instruct", "EMD, 1 step": "student"}
ROLES = {
    "EMD, 1 step": "ours",
    "Diff-Instruct, 1 step": "rival",
    "teacher, 1 step": "trivial",
    "teacher, 30 steps": "reference",
    "real against real": "reference",
}
CAPTION_SETS, SCENES_BETWEEN_SETS = 4, 10_000
"""Recall is the mean over sets of captions: on one of 1,000 it is uncertain by 0.004."""


@claim(
    "emd.student",
    paper=PAPER,
    figure="Table 1: one step close to the many-step teacher (FID on the attribute classifier's features)",
    target="FID <= 1.5 x the teacher's at 30 steps and >= 3 x better than its single step; recall >= Diff-Instruct's; "
    "agreement >= 90 % of the teacher's",
    minutes=25,
    quick_minutes=1,
)
def student(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Teacher with 30 steps and with one, Diff-Instruct and EMD with one, on the same captions and seeds.

    Quick: 100 captions, of which the teacher's 30 steps take most of the time; one set for the recall. Differences
    between small sets are ignored.
    """
    return measure_students(one_step_students(), model, progress, quick)


@claim(
    "emd.student.avataaars",
    paper=PAPER,
    figure="emd.student on faces of DiceBear's Avataaars",
    target="FID <= 1.5 x the teacher's at 30 steps and >= 3 x better than its single step; recall >= Diff-Instruct's; "
    "agreement >= 90 % of the teacher's",
    minutes=28,
    quick_minutes=1,
)
def student_avataaars(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As emd.student, with the students that the recipe ``students`` made by the shipped student's recipe."""
    folder = avataaars_folder(model, avataaars)
    return measure_students(trained_students(folder), folder, progress, quick)


def measure_students(students: dict[str, Generate], model: str | None, progress: Progress, quick: bool) -> ClaimResult:
    """The claim on a model's students, as in :data:`STUDENTS`."""
    count, sets = (QUICK_SAMPLES, 1) if quick else (CAPTION_COUNT, CAPTION_SETS)
    judge = Judge.open(FIRST_SCENE, count, model)
    total = count * sets
    rows = {name: judge.row(images, seconds) for name, images, seconds in all_samples(judge, students, progress, total)}
    recall = _recalls(rows, students, sets, partial(Judge.open, count=count, model=model), progress)
    others = range(FIRST_SCENE + 3 * count, FIRST_SCENE + 4 * count)
    fresh = judge.portraits.draw(judge.portraits.dataset.sample_scenes(others))
    rows["real against real"] = {"FID": round(judge.distance(fresh), 2)}
    fid = rows["EMD, 1 step"]["FID"]
    figures: dict[str, Any] = {
        "arms": arms({name: row["FID"] for name, row in rows.items() if "FID" in row}, ROLES), "n": count,
        "tables": (Table("Coverage and agreement", ("samples", "recall", "precision", "agreement"), tuple(
            (name, *(row.get(k) for k in ("recall", "precision", "agreement"))) for name, row in rows.items()
            if "recall" in row)),),
    }  # fmt: skip
    if quick:
        span = fid - QUICK_DISTANCE, fid + QUICK_DISTANCE
        return ClaimResult(fid, span, _holds_quickly(rows), rows, **figures)
    emd, many, single = (rows[k] for k in ("EMD, 1 step", "teacher, 30 steps", "teacher, 1 step"))
    holds = fid <= 1.5 * many["FID"] and 3 * fid <= single["FID"]
    holds = holds and recall["EMD, 1 step"] >= recall["Diff-Instruct, 1 step"]
    holds = holds and emd["agreement"] >= 0.9 * many["agreement"]
    return ClaimResult(fid, None, holds, rows, **figures)


def _holds_quickly(rows: dict[str, dict[str, Any]]) -> bool:
    """Nothing contradicts the target; the distance of real pictures, the bias of a small set, is subtracted."""
    names = ("EMD, 1 step", "teacher, 1 step", "teacher, 30 steps", "Diff-Instruct, 1 step", "real against real")
    emd, single, many, baseline, real = (rows[name] for name in names)
    nearest, farthest = emd["FID"] - QUICK_DISTANCE, single["FID"] + QUICK_DISTANCE
    holds = nearest <= 1.5 * many["FID"] and 3 * (nearest - real["FID"]) <= farthest - real["FID"]
    holds = holds and emd["recall"] >= baseline["recall"] - QUICK_RECALL
    return holds and emd["agreement"] >= 0.9 * many["agreement"]


def trained_students(folder: str) -> dict[str, Generate]:
    """As :func:`one_step_students`, of the students in a model's folder."""
    home = Path(folder) / "students"
    return {name: open_student(student_path(home, kind), folder) for name, kind in STUDENTS.items()}


def open_student(file: Path, model: str | None) -> Generate:
    """The one-step sampler of a file that the recipe ``students`` wrote for a model, by default the portraits."""
    from ...engine.pipelines.emd import EMDOneStepPipeline
    from ..portraits.avataaars import open_model

    if not file.is_file():
        own = f"--model {model} " if model else ""
        remedy = f"run `python -m vitrine.evidence.recipes students {own}--out {file.parent}`"
        raise refuse("student", str(file), "a trained student", remedy)
    opened = open_model(model)
    pipe = EMDOneStepPipeline.from_pipe(opened.pipeline())
    preset = pipe.load_student(file, base=opened.dataset.name)
    return _once(Denoiser.from_diffusers(pipe), preset)


def one_step_students() -> dict[str, Generate]:
    """Name -> the one-step sampler of each shipped student, as in :data:`STUDENTS`."""
    return {
        name: _once(Denoiser.from_diffusers(pipe), preset)
        for name, (pipe, preset) in ((name, one_step_pipeline(file)) for name, file in STUDENTS.items())
    }


def _recalls(
    rows: dict[str, dict[str, Any]],
    students: dict[str, Generate],
    sets: int,
    judge_from: Callable[[int], Judge],
    progress: Progress,
) -> dict[str, float]:
    """Mean recall of each student; ``rows`` have the first set's and receive all, with intervals of distances."""
    recalls = {name: [rows[name]["recall"]] for name in students}
    distances = {name: [rows[name]["FID"]] for name in students}
    for k in range(1, sets):
        judge = judge_from(FIRST_SCENE + k * SCENES_BETWEEN_SETS)
        for name, generate in students.items():
            row = judge.row(*judge.draw(generate))
            recalls[name].append(row["recall"])
            distances[name].append(row["FID"])
        progress((1 + k) * len(judge.prompts), sets * len(judge.prompts), None)
    for name, values in recalls.items():
        rows[name] |= {"mean recall": round(sum(values) / sets, 4), "recall on each set": values}
        rows[name] |= {"FID over sets": spread(distances[name]), "FID on each set": distances[name]}
    baseline, emd = (distances[name] for name in STUDENTS)
    rows["EMD's FID minus Diff-Instruct's, paired"] = spread([e - b for e, b in zip(emd, baseline, strict=True)])
    return {name: rows[name]["mean recall"] for name in recalls}


def all_samples(
    judge: Judge, students: dict[str, Generate], progress: Progress, total: int
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(name, (N, 3, 64, 64) pictures in [0, 1], seconds in the denoiser) of each way to sample."""
    from ..portraits.sampling import decode, sample_latents

    portraits, start, latents = judge.portraits, time.perf_counter(), []
    for i in range(0, len(judge.prompts), BATCH):
        prompts = judge.prompts[i : i + BATCH]
        latents.append(sample_latents(portraits, prompts, list(range(i, i + len(prompts)))))
        progress(i + BATCH, total, None)
    yield "teacher, 30 steps", decode(portraits, torch.cat(latents)), time.perf_counter() - start
    teacher = Denoiser.from_diffusers(portraits.unet, portraits.scheduler)
    yield "teacher, 1 step", *judge.draw(_once(teacher, StudentPreset()))
    for name, generate in students.items():
        yield name, *judge.draw(generate)


def _once(net: Denoiser, preset: StudentPreset) -> Generate:
    return partial(one_step, net, preset=preset)
