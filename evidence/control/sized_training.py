"""Trains the portraits transformer with two size weights, and the flip condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.control.control_trainer import AdvancedControlTrainConfig, ControlTrainConfig
from ...engine.control.embedder import ControlEmbedder
from ...engine.control.embedding_hook import control_width
from ...engine.control.gamma import GammaConfig
from ...engine.control.spec import ControlSpec
from ...engine.errors import refuse
from ...engine.portraits.dataset import PORTRAITS
from ...engine.portraits.models import Portraits
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.config import Config
from ..portraits.avataaars import open_model
from ..portraits.transformer import AS_FOUND, Collection, build_transformer, saved_data
from .controlled_transformer import ControlledTransformer, TransformerTrainer, export_transformer, load_controlled
from .flip_lessons import FlipLessons

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
WEIGHTS = {"power-cosine": GammaConfig("power_cos", 4.0), "constant": GammaConfig("constant")}
"""The two models: the paper's curve against SDXL's constant weight."""
_SIDES = Collection(mirrored=0.0, sides=0.75)
LESSONS: dict[str, tuple[type[TransformerTrainer], Collection]] = {
    "collection": (TransformerTrainer, AS_FOUND),
    "sides": (TransformerTrainer, _SIDES),
    "flips": (FlipLessons, _SIDES),
}
"""Training stages: images as found; left and right, on unflipped images; the flip condition."""


@dataclass(frozen=True)
class TransformerTrainConfig(Config):
    """Training settings.

    Attributes:
        weight: size weight, one of ``WEIGHTS``.
        pictures: number of training images, rendered and encoded first.
        steps, batch: updates, and images per update.
        start: a transformer to start from, by name or folder, instead of random weights.
        lr: of Adam; falls to zero over the last quarter.
        lesson: one of ``LESSONS``.
    """

    weight: str = "power-cosine"
    pictures: int = 10_240
    steps: int = 10_000
    batch: int = 32
    start: str | None = None
    lr: float = 1.5e-3
    lesson: str = "collection"

    def __post_init__(self) -> None:
        for name, accepted in (("weight", WEIGHTS), ("lesson", LESSONS)):
            if getattr(self, name) not in accepted:
                raise refuse(name, getattr(self, name), sorted(accepted), "name one of them")

    @property
    def name(self) -> str:
        """Name of the export's folder."""
        return self.weight if self.lesson == "collection" else f"{self.weight}-{self.lesson}"


def new_transformer(weight: str, portraits: Portraits, seed: int = 0) -> ControlledTransformer:
    """Transformer and embedder with seeded random weights."""
    transformer = build_transformer(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        embedder = ControlEmbedder(ControlSpec(), control_width(transformer))
    return ControlledTransformer(portraits, transformer, embedder, WEIGHTS[weight], portraits.scheduler)


def train_transformer(
    folder: str | Path,
    config: TransformerTrainConfig,
    until: int | None = None,
    progress: Callable[[str], Progress] = lambda name: silent,
    device: torch.device | None = None,
    model: str | None = None,
) -> Path:
    """Data, training, export to ``folder/NAME``; a stopped run resumes.

    Args:
        until: stop after this many updates in total.
        device: where to train; None is the CPU. Images are rendered and encoded on the CPU.
        model: folder of the 64 px model whose dataset, text encoder and autoencoder are used; None is the shipped one.
    """
    trainer_of, kind = LESSONS[config.lesson]
    folder, portraits = Path(folder), open_model(model)
    if not isinstance(portraits, Portraits):
        raise refuse("model", model, "a 64 px model's folder", "leave it out for the portraits")
    own = "" if portraits.dataset is PORTRAITS else f"{portraits.dataset.name}-"
    if own and config.lesson != "collection":
        raise refuse("lesson", config.lesson, "collection", f"caps and moles are not in {portraits.dataset.name}")
    file = folder / f"{own}pictures-{kind.mirrored:g}-mirrored-{kind.sides:g}-sided.safetensors"
    data = saved_data(file, portraits, config.pictures, progress=progress("pictures"), kind=kind)
    trained = new_transformer(config.weight, portraits)
    if config.start is not None:
        trained.transformer, trained.embedder, _ = load_controlled(config.start)
    if device is not None:
        trained.to(device)
    # The flip is learned abruptly; a slower average would lag behind.
    ema = 0.99 if config.lesson == "flips" else 0.999
    advanced = AdvancedControlTrainConfig(betas=(0.9, 0.95), ema=ema, save_every=250, drop_together=False)
    settings = ControlTrainConfig(
        config.steps, config.batch, config.lr, gamma=WEIGHTS[config.weight], advanced=advanced
    )
    trainer = trainer_of(trained, data, settings, folder / f"{config.name}.run")
    trainer.train(progress("training"), until)
    return export_transformer(trainer, folder, config.name).parent
