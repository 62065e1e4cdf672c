"""How the toy models were made: ``python -m vitrine.evidence.recipes NAME``. Heavy imports are in `run`.

Each recipe made files that ship with the pack, or that claims about other faces need; the same command resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from tyro.conf import OmitArgPrefixes, Positional, arg

from ...engine.errors import VitrineError, refuse
from ...engine.settings.setting_checks import Count, OutFile, OutFolder, Writes, check_settings
from .settings import (
    AdvancedFlowTrainConfig,
    AdvancedTrainConfig,
    FlowTrainConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Portraits(TrainConfig):
    """Train the portraits model; the same command resumes an interrupted run."""

    advanced: OmitArgPrefixes[AdvancedTrainConfig] = field(default_factory=AdvancedTrainConfig)

    def run(self) -> int:
        """0 when finished, or stopped by `--max-seconds`."""
        from .portraits import STAGES, main

        return _train(main, self, STAGES)


@dataclass(frozen=True)
class Avataaars(TrainConfig):
    """Train a model on the faces of npm's @dicebear/avataaars; the same command resumes an interrupted run."""

    layers: Positional[Annotated[Path, arg(metavar="LAYERS")]] = Path("layers.safetensors")
    """The drawings that `node evidence/portraits/draw_layers.mjs PACKAGES LAYERS` wrote."""
    out: Annotated[str, Writes("folder")] = "avataaars-run"
    """Folder for the states of the phases and the finished model."""
    advanced: OmitArgPrefixes[AdvancedTrainConfig] = field(default_factory=AdvancedTrainConfig)

    def run(self) -> int:
        """0 when finished, or stopped by `--max-seconds`."""
        from .portraits import STAGES, train_avataaars

        return _train(partial(train_avataaars, self.layers), self.recipe(), STAGES)

    def recipe(self) -> TrainConfig:
        """The portraits' settings: where the drawings are is none of them."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})


@dataclass(frozen=True)
class Flow(FlowTrainConfig):
    """Train the flow portraits, 128 px; the same command resumes an interrupted run."""

    advanced: OmitArgPrefixes[AdvancedFlowTrainConfig] = field(default_factory=AdvancedFlowTrainConfig)

    def run(self) -> int:
        """0 when finished, or stopped by `--max-seconds`."""
        from .flow import STAGES, main

        return _train(main, self, STAGES)


@dataclass(frozen=True)
class Identity:
    """Fit the projection that distinguishes people of a model's dataset, from its attribute classifier."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """Model folder, such as the one that the recipe `portraits` writes."""
    people: Count = 600
    """People on whose pictures it is fitted, ten of each."""

    def run(self) -> int:
        """0 when written."""
        from ...engine.runtime.progress import TqdmProgress
        from ..portraits.avataaars import open_model
        from ..portraits.classifier import load_classifier
        from ..portraits.identities import save_identity

        classifier = self.folder / "readout" / "readout.safetensors"
        if not classifier.is_file():
            raise refuse("model folder", str(self.folder), "a folder with the attribute classifier", "train one")
        dataset = open_model(self.folder).dataset
        out = classifier.with_name("identity.safetensors")
        path = save_identity(load_classifier(classifier, dataset), out, TqdmProgress("people"), self.people)
        print(f"projection: {path}")
        return 0


@dataclass(frozen=True)
class Students:
    """Distil students by EMD and, for as long, by Diff-Instruct with the shipped ones' recipe; a rerun resumes."""

    model: str | None = None
    """Model folder, such as the one that the recipe `avataaars` writes; by default the shipped portraits."""
    out: OutFolder | None = None
    """Folder for students and their runs; by default `students` in the model's folder."""
    share: float = 1.0
    """Of the updates of the shipped student's recipe."""

    def run(self) -> int:
        """0 when written."""
        from ...engine.runtime.stages import Stages
        from ..emd.toy_students import STAGES, train_students

        if self.out is None and self.model is None:
            raise refuse("out", None, "a folder", "the shipped model's folder is not written to")
        out = self.out or Path(self.model or "") / "students"
        bars = Stages(dict.fromkeys(STAGES))
        for path in train_students(self.model, out, self.share, bars.bar):
            print(f"student: {path}")
        return 0


@dataclass(frozen=True)
class Plants:
    """Train further memorized pictures into a portraits model, as a LoRA with its list; a few minutes on one core."""

    out: OutFile = Path("later-plants.safetensors")
    """The LoRA's file; the list of its pictures is written next to it, with the suffix .json."""
    set: str = "later-plants"
    """Which pictures: later-plants (eight), plants-daily (twelve), plants-twice, plants-thirty, plants-shirts,
    plants-common-pose, plants-daily-flow or plants-turned-flow (four each; the last two on the flow model)."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when written."""
        from ...engine.pipelines.loading import LoadConfig
        from ...engine.runtime.progress import TqdmProgress
        from ..nemo.later_plants import plant_later

        device = LoadConfig(self.device).checked_place
        path = plant_later(self.out, self.set, progress=TqdmProgress("steps"), device=device)
        print(f"LoRA: {path}; pictures: {path.with_suffix('.json')}")
        return 0


@dataclass(frozen=True)
class PairSliders:
    """Train the shipped people's sliders from pairs of renders, where the space lacks them; a rerun resumes."""

    labels: tuple[str, ...] = (
        "red hair",
        "long hair",
        "curly hair",
        "pale skin",
        "bald",
        "blond hair",
        "dark skin",
        "white hair",
        "black hair",
    )
    """Attributes to train a slider for; one that the space has is left as it is."""
    file: OutFile | None = None
    """The space, rewritten after each label; by default the shipped `people.w2w.safetensors`."""
    work: OutFolder = Path("pair-sliders")
    """Folder for the states of the trainings."""

    def run(self) -> int:
        """0 when written."""
        from ...engine.portraits.shipped import PEOPLE_SPACE
        from ...engine.runtime.progress import TqdmProgress
        from ..w2w.pair_sliders import train_shipped_sliders
        from ..w2w.people import LABELS

        unknown = [label for label in self.labels if label not in LABELS]
        if unknown:
            raise refuse("label", unknown[0], sorted(LABELS), "take one of them")
        file = self.file or PEOPLE_SPACE
        space = train_shipped_sliders(self.labels, self.work, file, TqdmProgress("sliders"))
        print(f"space: {file}, {len(space.directions)} directions")
        return 0


@dataclass(frozen=True)
class Sizes:
    """Train a PixArt-shaped portraits model with one size-weight curve; the same command resumes."""

    weight: Literal["power-cosine", "constant"] = "power-cosine"
    """The paper's curve, or SDXL's constant weight."""
    out: OutFolder = Path("portraits-transformer")
    """Folder for the state and the exported model."""
    pictures: Count = 10_240
    """Training pictures, rendered and encoded first."""
    steps: Count = 10_000
    """Updates."""
    batch: Count = 32
    """Batch size."""
    start: str | None = None
    """A transformer to start from, by name or folder, instead of random weights."""
    lr: float = 1.5e-3
    """Adam's learning rate; falls to zero over the last quarter."""
    lesson: Literal["collection", "sides", "flips"] = "collection"
    """collection: pictures as found; sides: left and right, on unflipped pictures; flips: then the flip condition."""
    stop_after: int | None = None
    """Stop after this many updates in total (the state is saved)."""
    model: str | None = None
    """Folder of a 64 px model, such as that of the recipe `avataaars`; by default the shipped portraits."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when finished."""
        from ...engine.pipelines.loading import LoadConfig
        from ...engine.portraits.shipped import transformer_folder
        from ...engine.runtime.stages import Stages
        from ..control.sized_training import TransformerTrainConfig, train_transformer

        if self.start is not None:
            transformer_folder(self.start)  # raises before the pictures are rendered
        config = TransformerTrainConfig(
            self.weight, self.pictures, self.steps, self.batch, self.start, self.lr, self.lesson
        )
        device = LoadConfig(self.device).checked_place
        stages = Stages(dict.fromkeys(("pictures", "training")))
        folder = train_transformer(self.out, config, self.stop_after, stages.bar, device, self.model)
        print(f"model: {folder}")
        return 0


@dataclass(frozen=True)
class Transfer:
    """Fine-tune the 64-pixel transformer at 128 pixels, each part of the transfer on and off; the same command resumes.

    Frechet distances at steps 0, 50, 100, 200, 400, ... are stored in FOLDER/ARM-SEED/curve.json and, together, in
    FOLDER/curves.json, which `vitrine reproduce resolution.transfer --model FOLDER` reads.
    """

    folder: OutFolder = Path("portraits-128")
    """Folder for pictures, states and curves."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of every arm per seed."""
    arms: tuple[str, ...] = ()
    """grid-rescaled, extrapolated-rescaled, grid-plain; none means all."""
    steps: Count = 400
    """Updates per run."""
    source: str = "power-cosine"
    """The 64-pixel model: a shipped one or a folder."""
    batch: Count = 8
    """Batch size."""
    lr: float = 5e-4
    """Learning rate, constant."""
    ema: float = 0.995
    """Decay of the averaged weights, which are measured."""
    pictures: Count = 2048
    """Training pictures, rendered and encoded first."""
    samples: Count = 250
    """Pictures per Frechet distance."""
    guidance: float = 1.0
    """Guidance scale of these; 1 is none and costs half."""
    stop_after: int | None = None
    """Stop each run after this many updates (the state is saved)."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when finished."""
        from ...engine.pipelines.loading import LoadConfig
        from ...engine.portraits.shipped import transformer_folder
        from ...engine.runtime.stages import Stages
        from ..resolution.curves import mean_curve
        from ..resolution.transfer_training import ARMS, TransferConfig, transfer

        transformer_folder(self.source)  # raises before the pictures are rendered
        config = TransferConfig(
            self.source, self.batch, self.lr, self.ema, self.pictures, self.samples, guidance=self.guidance
        )
        arms, device = self.arms or tuple(ARMS), LoadConfig(self.device).checked_place
        runs = [f"{arm} {seed}" for seed in self.seeds for arm in arms]
        stages = Stages(dict.fromkeys(["pictures", *runs]))
        curves = transfer(self.folder, self.seeds, self.steps, config, arms, self.stop_after, stages.bar, device)
        for arm, seeds in curves.items():
            distances = "  ".join(f"{step}: {fid:.2f}" for step, fid in mean_curve(seeds).items())
            print(f"{arm:<24} seeds {list(seeds)}  FID {distances}")
        print(f"curves: {self.folder / 'curves.json'}")
        return 0


@dataclass(frozen=True)
class Export:
    """Save the model of one run as a transformer that loads by folder, in half precision."""

    folder: Path = Path("portraits-128")
    """The folder of the recipe `transfer`."""
    out: OutFolder = Path("power-cosine-128")
    """Folder to write; the shipped one is engine/portraits/weights/transformer/power-cosine-128."""
    arm: str = "grid-rescaled"
    """Which arm."""
    seed: int = 0
    """Which seed."""

    def run(self) -> int:
        """0 when written."""
        from ..resolution.transfer_training import export

        print(f"model: {export(self.folder, self.out, self.arm, self.seed)}")
        return 0


def _train(main: Callable[..., Any], config: Any, stages: tuple[str, ...]) -> int:
    """Trains; a run whose time is up prints how to resume it."""
    from ...engine.runtime.stages import Stages
    from .phase import OutOfTime

    try:
        print(f"model: {main(config, Stages(dict.fromkeys(stages)).bar)}")
    except OutOfTime as stopped:
        print(f"{stopped}; the same command resumes")
    return 0


RECIPES: dict[str, type] = {
    "portraits": Portraits, "avataaars": Avataaars, "flow": Flow, "identity": Identity,
    "students": Students, "plants": Plants, "pair-sliders": PairSliders, "sizes": Sizes,
    "transfer": Transfer, "export": Export,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one recipe; 2 after bad input, explained on stderr."""
    import tyro
    from tyro.conf import subcommand

    from ...engine.runtime.quiet import quiet_libraries

    members: Any = tuple(Annotated[recipe, subcommand(name)] for name, recipe in RECIPES.items())
    union: Any = Union[members]  # noqa: UP007
    try:
        recipe = tyro.cli(union, args=arguments, prog="python -m vitrine.evidence.recipes", description=__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        return 2
    try:
        check_settings(recipe)
        with quiet_libraries():
            return int(recipe.run())
    except (VitrineError, OSError) as error:
        print(f"recipes: {error}", file=sys.stderr)
        return 2
