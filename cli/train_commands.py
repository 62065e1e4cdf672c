"""`vitrine train portraits | avataaars | flow | decoder | identity | students | plants`: trains the toy models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..engine.errors import refuse
from ..engine.settings.setting_checks import Count, OutFile, OutFolder, Writes
from ..evidence.portraits.flow_config import (
    AdvancedDecoderTrainConfig,
    AdvancedFlowTrainConfig,
    DecoderTrainConfig,
    FlowTrainConfig,
)
from ..evidence.portraits.train_config import AdvancedTrainConfig, TrainConfig


@dataclass(frozen=True)
class Portraits(TrainConfig):
    """Train the portraits model; the same command resumes an interrupted run."""

    advanced: OmitArgPrefixes[AdvancedTrainConfig] = field(default_factory=AdvancedTrainConfig)

    def run(self) -> int:
        """0 when finished, or stopped by `--max-seconds`."""
        from ..evidence.portraits.train import STAGES, main

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
        from ..evidence.portraits.avataaars_train import train_avataaars
        from ..evidence.portraits.train import STAGES

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
        from ..evidence.portraits.flow_train import STAGES, main

        return _train(main, self, STAGES)


@dataclass(frozen=True)
class Decoder(DecoderTrainConfig):
    """Train a finished flow model's decoder for sharp images; the same command resumes an interrupted run."""

    advanced: OmitArgPrefixes[AdvancedDecoderTrainConfig] = field(default_factory=AdvancedDecoderTrainConfig)

    def run(self) -> int:
        """0 when finished, or stopped by `--max-seconds`."""
        from ..evidence.portraits.decoder_train import STAGES, main

        return _train(main, self, STAGES)


@dataclass(frozen=True)
class Identity:
    """Fit the projection that distinguishes people of a model's dataset, from its attribute classifier."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """Model folder, such as the one `vitrine train portraits` writes."""
    people: Count = 600
    """People on whose pictures it is fitted, ten of each."""

    def run(self) -> int:
        """0 when written."""
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.portraits.avataaars import open_model
        from ..evidence.portraits.classifier import load_classifier
        from ..evidence.portraits.identities import save_identity

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
    """Model folder, such as the one `vitrine train avataaars` writes; by default the shipped portraits."""
    out: OutFolder | None = None
    """Folder for students and their runs; by default `students` in the model's folder."""
    share: float = 1.0
    """Of the updates of the shipped student's recipe."""

    def run(self) -> int:
        """0 when written."""
        from ..engine.runtime.stages import Stages
        from ..evidence.emd.toy_students import STAGES, train_students

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
    """Which pictures: later-plants (eight), plants-twice, plants-thirty, plants-usual-pose, plants-shirts or
    plants-flow (four each; the last on the flow model)."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when written."""
        from ..engine.pipelines.loading import LoadConfig
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.nemo.later_plants import plant_later

        device = LoadConfig(self.device).checked_place
        path = plant_later(self.out, self.set, progress=TqdmProgress("steps"), device=device)
        print(f"LoRA: {path}; pictures: {path.with_suffix('.json')}")
        return 0


def _train(main: Callable[..., Any], config: Any, stages: tuple[str, ...]) -> int:
    """Trains; a run whose time is up prints how to resume it."""
    from ..engine.runtime.stages import Stages
    from ..evidence.portraits.phase import OutOfTime

    try:
        print(f"model: {main(config, Stages(dict.fromkeys(stages)).bar)}")
    except OutOfTime as stopped:
        print(f"{stopped}; the same command resumes")
    return 0


COMMANDS: dict[str, type] = {
    "portraits": Portraits, "avataaars": Avataaars, "flow": Flow, "decoder": Decoder, "identity": Identity,
    "students": Students, "plants": Plants,
}  # fmt: skip
