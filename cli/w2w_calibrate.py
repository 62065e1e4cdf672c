"""`vitrine w2w calibrate | pairs`: sliders from classifier readings, and from pictures before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import named
from ..engine.io.tables import read_records
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFolder, Side
from .options import Load, OutSpace
from .w2w_arguments import model_of, space_at


def readings_in(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Label -> (strength, reading) pairs of a CSV with the columns label, strength, reading."""
    curves: dict[str, list[tuple[float, float]]] = {}
    accepted = "a CSV with the columns label, strength, reading; the last two are numbers"
    with named(path, "readings", accepted, "correct the file"):
        for number, row in enumerate(read_records(path, ("label", "strength", "reading"), "readings"), 2):
            try:
                pair = (float(row["strength"]), float(row["reading"]))
            except ValueError:
                pair = (math.nan, math.nan)
            if not all(map(math.isfinite, pair)):
                raise refuse("readings", f"line {number} of {path.name}", accepted, "correct the line")
            curves.setdefault(row["label"], []).append(pair)
    return curves


def paired_names(before: Path, after: Path) -> list[str]:
    """Names of the picture files that both folders have."""
    from ..engine.io.picture_files import pictures_in

    sides = [{p.name for p in pictures_in(folder)} for folder in (before, after)]
    if not sides[0] or sides[0] != sides[1]:
        shown = sorted(sides[0] ^ sides[1])[:3] or "no pictures"
        raise refuse("pictures", shown, "two folders with files of the same names", "give pairs the same names")
    return sorted(sides[0])


@dataclass(frozen=True)
class Calibrate:
    """Fit the maps of calibrated sliders: positions 0 .. 1 along which a classifier's reading rises evenly.

    From a table of readings of your own space, or for the portraits dataset by its attribute classifier.
    """

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """A space file."""
    readings: Positional[Annotated[Path | None, arg(metavar="[READINGS]")]] = None
    """CSV with the columns label, strength, reading: mean presence of the attribute in pictures of several
    models, at strengths from 0 up; readings of any unit, such as a classifier's probability or your own marks."""
    start: float = 1000.0
    """Timestep from which the edits were applied in the readings."""
    portraits: bool = False
    """The space has the shipped people: readings by the attribute classifier, on people 200 to 399."""
    labels: tuple[str, ...] = ()
    """Portraits only: these labels; none: all labels of the attribute classifier."""
    people: Count = 24
    """Portraits only: number of people per slider."""
    pairs: tuple[str, ...] = ()
    """Portraits only: labels that also get a direction trained from pairs, 'red hair (pairs)' next to 'red hair'."""
    work: OutFolder = Path("calibrate.work")
    """Portraits only: folder for the state of these trainings; the same command resumes."""
    out: OutSpace = None
    """The calibrated space; none: overwrites SPACE."""
    dtype: str = "float16"
    """Of components in the file: float32, float16 or bfloat16."""

    def run(self) -> int:
        """0 on success."""

        if self.portraits == (self.readings is not None):
            raise refuse("readings", "none or both", "a CSV file, or --portraits", "give one of the two")
        space, target = space_at(self.space), self.out or self.space
        space = self._by_classifier(space, target) if self.portraits else self._by_table(space)
        for label, points in sorted(space.info["strength_maps"].items()):
            print(f"{label}: strengths {', '.join(f'{s:.2f}' for s in points['strengths'])}, from {points['start']:g}")
        print(f"space: {space.save(target, self.dtype)}")
        return 0

    def _by_table(self, space: Any) -> Any:
        from ..engine.w2w import fit_strengths, with_strength_maps

        curves = readings_in(self.readings or Path())
        maps = {}
        for label, curve in curves.items():
            strengths, readings = zip(*sorted(curve), strict=True)
            maps[label] = fit_strengths(strengths, readings, self.start)
        return with_strength_maps(space, maps)

    def _by_classifier(self, space: Any, target: Path) -> Any:
        """Saves after each direction and map, so that a stopped command loses little."""
        from ..engine.runtime.stages import Stages
        from ..evidence.w2w.calibrate import calibrated, with_pairs
        from ..evidence.w2w.pair_sliders import name_of
        from ..evidence.w2w.people import LABELS

        unknown = [label for label in (*self.labels, *self.pairs) if label not in LABELS]
        if unknown:
            raise refuse("labels", unknown, sorted(LABELS), "name labels that the attribute classifier knows")
        pairs, labels = [p for p in self.pairs if name_of(p) not in space.directions], self.labels or tuple(LABELS)
        stages = Stages(dict.fromkeys([*(f"training {p}" for p in pairs), *(f"reading {name}" for name in labels)]))
        for label in pairs:
            bar = stages.bar(f"training {label}")
            space = with_pairs(space, label, self.work / label.replace(" ", "_"), bar)
            space.save(target, self.dtype)
        for label in labels:
            space = calibrated(space, (label,), self.people, progress=stages.bar(f"reading {label}"))
            space.save(target, self.dtype)
        return space


@dataclass(frozen=True)
class PairSlider:
    """Train a slider from pictures before and after: two folders with files of the same names; stored in the space.

    Everything else in the pictures is kept: training penalises other changes.
    """

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file to which the direction is added."""
    before: Positional[Annotated[Path, arg(metavar="BEFORE")]]
    """Folder of pictures without the attribute."""
    after: Positional[Annotated[Path, arg(metavar="AFTER")]]
    """Folder of the same pictures with it."""
    label: str = "my slider"
    """Name of the slider."""
    shown: str | None = None
    """Who is in the pictures: a .w2wmodel file or a training model's name; none: the mean model."""
    model: str = "portraits"
    """The base model of the space: a Stable Diffusion 1.x / 2.x folder or hub id."""
    prompt: str = "sks person"
    """The prompt that the LoRAs were trained with, or a description of the pictures without subject and attribute."""
    steps: Count = 150
    """Adam steps of 16 pictures."""
    start: float = 1000.0
    """Timestep from which the slider is applied; it is trained below it."""
    size: Side | None = None
    """Side in pixels; none: the base model's."""
    out: OutSpace = None
    """The space with the slider; none: overwrites SPACE."""
    save_dtype: str = "float16"
    """Of components in the file: float32, float16 or bfloat16."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success; the same command resumes."""
        import shutil

        import torch

        from ..engine.activations.picture_latents import to_pixels
        from ..engine.io.picture_files import open_rgb
        from ..engine.pipelines import W2WPipeline
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import PairConfig, with_pair_slider

        space, names = space_at(self.space), paired_names(self.before, self.after)
        rows = model_of(space, self.shown)[0].coefficients[:1] if self.shown else torch.zeros(1, space.dimension)
        pipe = load_pipeline(self.model, W2WPipeline, self.load)
        side = self.size or int(pipe.unet.config.sample_size) * pipe.vae_scale_factor
        sides = [
            torch.cat([to_pixels(open_rgb(folder / name).resize((side, side)), side) for name in names])
            for folder in (self.before, self.after)
        ]
        target = self.out or self.space
        work = target.with_name(f".{target.name}.{self.label.replace(' ', '_')}.work")
        config = PairConfig(steps=self.steps, start=self.start)
        bar = TqdmProgress("training")
        change = pipe.train_pair_slider(space, sides[0], sides[1], self.prompt, rows, config, work, bar)
        space = with_pair_slider(space, self.label, change)
        saved = space.save(target, self.save_dtype)
        shutil.rmtree(work, ignore_errors=True)
        print(f"{saved}: {self.label} reproduces the pairs at strength {space.info['pair_sliders'][self.label]:.2f}")
        return 0
