"""Published few-step students: through the student preset, and as their authors run them in stock diffusers.

There is no published figure to compare with: at equal seeds both must give the same picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.diffusion.noise import generators
from ...engine.emd import StudentPreset, StudentSampling, check_student, detect, read_student
from ...engine.errors import VitrineError
from ...engine.io.files import read_artefact, save_artefact
from ...engine.nemo.blocked_copies import picture_distance
from ...engine.pipelines import EMDOneStepPipeline
from ...engine.pipelines.emd import student_scheduler
from ...engine.runtime.compat_diffusers import modules_of_class
from .context import SETTINGS, Context
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published

FOLDER = Need(
    "students",
    "students of this base as .safetensors, under their authors' file names: SDXL-Lightning, SD(XL)-Turbo, "
    "DMD2, Hyper-SD, LCM, TCD, PCM",
    "their authors' model pages",
    "of each student",
)
PROMPTS = ("a photo of a cat", "a portrait of an old man", "a red car in a street", "a bowl of fruit on a table")
SEEDS = (0, 1)
KIND, VERSION = "vitrine-verify-students", 1
_FIGURE = "largest difference between the two pictures of one seed (RMS at 64 px, 0..1)"
PUBLISHED = (
    Published(
        "students.difference",
        _FIGURE,
        0.0,
        None,
        "any base",
        "equal prompts and seeds",
        "by construction: the authors' scheduler in diffusers",
        anywhere=True,
    ),
)


@dataclass(frozen=True)
class Student:
    """A file, how it is sampled, and how its weights are to be loaded."""

    file: Path
    sampling: StudentSampling
    preset: StudentPreset


def prepare(context: Context) -> Estimate:
    """Two ways of drawing each picture of each student."""
    folder = context.path(FOLDER)
    files = 1 if folder is None else len(list(folder.glob("*.safetensors")))
    pictures = 2 * files * len(PROMPTS) * len(SEEDS)
    why = f"{files} students, {len(PROMPTS)} prompts and {len(SEEDS)} seeds, both ways"
    return context.pace.sampling(0, pictures, 2, context.budget, why)


@check(
    "students.pipeline",
    paper="the students' own papers and model cards",
    families=("SD", "SDXL"),
    needs=(FOLDER, SETTINGS),
    published=PUBLISHED,
    prepare=prepare,
)
def students(context: Context) -> Measured:
    """Each student's pictures both ways; files that are no students of this base are named and left out."""
    folder = context.path(FOLDER)
    assert folder is not None  # a check does not run without what it needs
    figures, differs, worst, count = {}, context.usual_notes("size", autocast=False), 0.0, 0
    bar, files = context.bar("students"), sorted(folder.glob("*.safetensors"))
    for number, file in enumerate(files):
        try:
            away, apart = _distances(context, _student(file, context))
        except VitrineError as error:
            differs.append(f"{file.name} left out: {error}")
            continue
        key = f"students.{file.stem}"
        figures[key] = Figure(f"{file.stem}: largest difference", round(float(away.max()), 8), None, len(away))
        figures[f"{key}.apart"] = Figure(f"{file.stem}: of two seeds", round(apart, 4), None, len(PROMPTS))
        worst, count = max(worst, float(away.max())), count + len(away)
        bar(number + 1, len(files), None)
    missing = {} if count else {PUBLISHED[0].key: "no file in the folder is a student of this base"}
    if count:
        figures[PUBLISHED[0].key] = Figure(PUBLISHED[0].figure, round(worst, 8), None, count)
    return Measured(figures, tuple(differs), missing)


def _student(file: Path, context: Context) -> Student:
    """How a file is run, by the preset in its header or else by its name."""
    detected = detect(file)
    if detected is not None:
        sampling = detected.sampling
        preset = StudentPreset(sampling.base, sampling.timesteps[0], trained_guidance=sampling.trained_guidance)
    else:
        preset = read_student(file, any_names=True)[0]
        sampler = "lcm" if preset.noise == "unit" else "euler"
        sampling = StudentSampling(preset.base, (preset.timestep,), sampler, prediction=preset.prediction)
    check_student(sampling, context.network)
    return Student(file, sampling, preset)


def _distances(context: Context, student: Student) -> tuple[torch.Tensor, float]:
    """(P x S,) distances between both ways, and the median one between two seeds; known ones are read again."""
    path = context.state("students.safetensors", student.file.name, context.sums.of(student.file))
    if path.is_file():
        tensors, header = read_artefact(path, KIND, VERSION)
        return tensors["away"], float(header["apart"])
    mine, theirs = _both(context, student)
    away = torch.cat([picture_distance(a[None], b[None]) for a, b in zip(mine, theirs, strict=True)])
    pairs = zip(mine[:: len(SEEDS)], mine[1 :: len(SEEDS)], strict=True)
    apart = float(torch.cat([picture_distance(a[None], b[None]) for a, b in pairs]).median())
    save_artefact(path, {"away": away}, KIND, VERSION, {"apart": apart}, lambda tensors, header: float(header["apart"]))
    return away, apart


@torch.no_grad()
def _both(context: Context, student: Student) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (P x S, 3, H, W) of our few-step loop, and of the stock pipeline with the authors' scheduler."""
    mine, theirs = [], []
    with _loaded(context, student) as (ours, stock):
        stock.scheduler, arguments = student_scheduler(stock, student.sampling)
        for prompt in PROMPTS:
            for seed in SEEDS:
                mine.append(ours.few_steps(prompt, [seed], student.sampling, output_type="pt").images.float().cpu())
                images = stock([prompt], generator=generators([seed]), output_type="pt", **arguments).images
                theirs.append(images.float().cpu())
    return torch.cat(mine), torch.cat(theirs)


@contextmanager
def _loaded(context: Context, student: Student) -> Iterator[tuple[Any, Any]]:
    """Our pipeline and a stock one around the student; the checkpoint is as it was when the block ends."""
    ours: Any = EMDOneStepPipeline.from_pipe(context.pipe)
    ours.set_progress_bar_config(disable=True)
    ours.load_student(student.file, preset=student.preset)
    own = type(context.pipe)
    names = modules_of_class(own)
    stock = own(**{name: part for name, part in ours.components.items() if name in names}, **_settings(context.pipe))
    stock.set_progress_bar_config(disable=True)
    try:
        yield ours, stock
    finally:
        if ours.unet is context.network:
            ours.unload_lora_weights()


def _settings(pipe: Any) -> dict[str, Any]:
    """Settings of a pipeline that are no components."""
    return {"requires_safety_checker": False} if "requires_safety_checker" in pipe.config else {}
