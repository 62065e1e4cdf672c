"""One-step students of the flow portraits, by EMD and by Diff-Instruct, compared with their teacher.

``python -m vitrine.evidence.emd.flow_one_step FOLDER`` trains three of each there and prints their metrics: half an
hour of a core, and it resumes where it was stopped. The attribute classifier sees pictures at 64 pixels.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import interpolate

from ...engine.emd import EStepConfig, StudentPreset
from ...engine.emd.train_config import EMDTrainConfig
from ...engine.io.files import write_json
from ...engine.pipelines.emd import EMDOneStepPipeline
from ...engine.pipelines.emd_training import training_parts
from ...engine.portraits import caption, render, sample_scenes
from ...engine.portraits.flow import load_flow_portraits
from ...engine.runtime.progress import Progress, TqdmProgress, silent
from ..metrics import frechet_distance, precision_recall
from ..portraits.classifier import attribute_accuracy, load_classifier, read
from ..portraits.sampling import decode, sample_latents
from .mixture_claims import spread

if TYPE_CHECKING:
    from ...engine.emd.emd_trainer import Trainer

RECIPE: dict[str, Any] = {
    "model": "flow portraits", "base": "flow portraits",
    "train": {
        "steps": 100, "batch": 8, "rank": 16, "guidance": 3.0, "score_updates": 2, "ema": 0.98, "lr_generator": 2e-4,
        "lr_score": 5e-4, "weight": "dmd", "auto_gz": False,
        "chain": {"steps": 2, "ge": 0.16, "gz": 0.01, "clip": 20.0},
    },
}  # fmt: skip
"""The training file of the EMD students; nothing was tuned."""
SEEDS = (0, 1, 2)
"""Of the training: initial weights, noise, caption order."""
EMD, SAME_UPDATES, SAME_TIME = "EMD", "Diff-Instruct, as many updates", "Diff-Instruct, as much time"
FIRST, BATCH = 7_330_000, 20
"""First of the scenes whose captions are sampled; the next twice as many are the real pictures."""


@torch.no_grad()
def judged(
    students: Mapping[str, str | Path], count: int = 100, steps: tuple[int, ...] = (4, 30), progress: Progress = silent
) -> dict[str, dict[str, float]]:
    """Sampling method -> Frechet distance to renders, precision, recall, agreement with the prompts.

    Args:
        students: name -> file; without any, the teacher alone is sampled.
        count: prompts, each with one picture; the same seeds for all.
        steps: of the teacher, with guidance 3, in addition to its single step.
    """
    model, net = load_flow_portraits(), load_classifier()
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

    def student_draws(preset: StudentPreset, texts: list[str], own: list[int]) -> torch.Tensor:
        images: torch.Tensor = pipe(texts, own, preset, output_type="pt").images
        return images

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
    for name, student in students.items():
        preset = pipe.load_student(student, base="flow portraits")
        rows[name] = row(partial(student_draws, preset))
    return rows


def trained(
    folder: Path, seeds: tuple[int, ...] = SEEDS, updates: int = 0, progress: Progress = silent
) -> dict[str, Path]:
    """Name -> file of the students: EMD, Diff-Instruct with as many updates, and with as much processor time.

    Args:
        folder: where the runs are kept, finished or not.
        seeds: a student of each kind for each.
        updates: of EMD; 0 takes the recipe's.
    """
    config = EMDTrainConfig.from_dict(RECIPE["train"])
    config = replace(config, steps=updates or config.steps)
    single = replace(config, chain=EStepConfig.diff_instruct())
    longer = replace(single, steps=_updates_in_the_same_time(config, single, folder))
    files = {}
    for seed in seeds:
        for name, settings in ((EMD, config), (SAME_UPDATES, single), (SAME_TIME, longer)):
            run = folder / f"{name} {seed}".replace(",", "").replace(" ", "_")
            files[f"{name} {seed}"] = _trainer(replace(settings, seed=seed), run).run(progress)[0]
    return files


def _trainer(config: EMDTrainConfig, folder: Path) -> Trainer:
    """With a separate teacher, since a run leaves its adapters in it."""
    return training_parts(RECIPE["model"], base=RECIPE["base"]).trainer(config, folder)


def _updates_in_the_same_time(config: EMDTrainConfig, single: EMDTrainConfig, folder: Path, timed: int = 4) -> int:
    """How many of Diff-Instruct's updates take as long as EMD's run; measured once and stored next to the runs."""
    kept = folder / "updates_in_the_same_time.json"
    if kept.exists():
        return int(json.loads(kept.read_text()))
    seconds = []
    for settings in (config, single):
        with tempfile.TemporaryDirectory() as scratch:
            trainer = _trainer(settings, Path(scratch))
            trainer.step()
            start = time.process_time()
            for _ in range(timed):
                trainer.step()
            seconds.append(time.process_time() - start)
    updates = round(config.steps * seconds[0] / seconds[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(kept, updates)
    return updates


def apart(rows: Mapping[str, Mapping[str, float]], other: str, figure: str, seeds: tuple[int, ...] = SEEDS) -> dict:
    """EMD's figure minus the other's, paired by seed: mean and half of its 95 % interval."""
    return spread([rows[f"{EMD} {seed}"][figure] - rows[f"{other} {seed}"][figure] for seed in seeds])


def main(folder: str) -> None:
    """Train what is missing in ``folder``, then print every row, and EMD's differences from Diff-Instruct."""
    rows = judged(trained(Path(folder), progress=TqdmProgress("training")), progress=TqdmProgress("drawing"))
    for name, figures in rows.items():
        print(name, figures)
    for other in (SAME_UPDATES, SAME_TIME):
        for figure in ("Frechet", "recall", "agreement"):
            print(f"{EMD} minus {other}, {figure}:", apart(rows, other, figure))


if __name__ == "__main__":
    main(sys.argv[1])
