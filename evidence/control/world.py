"""The portraits sibling: a PixArt-shaped model told size, crop and flip, trained under two weights of the size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...engine.control.embedder import ControlEmbedder
from ...engine.control.gamma import GammaConfig
from ...engine.control.inject import control_width
from ...engine.control.spec import ControlSpec
from ...engine.control.train import ControlTrainConfig
from ...engine.progress import Progress, silent
from ...engine.schedule import NoiseSchedule
from ..portraits.transformer import AS_FOUND, Collection, build_transformer
from .controlled_transformer import Sibling, SiblingTrainer, export_sibling, load_sibling
from .flip_lessons import FlipLessons

__all__ = ["PAPER", "WEIGHTS", "Sibling", "new_sibling", "train_sibling"]

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
WEIGHTS = {"power-cosine": GammaConfig("power_cos", 4.0), "constant": GammaConfig("constant")}
"""The two models: the paper's curve against SDXL's constant weight."""
_SIDES = Collection(mirrored=0.0, sides=0.75)
LESSONS: dict[str, tuple[type[SiblingTrainer], Collection]] = {
    "collection": (SiblingTrainer, AS_FOUND), "sides": (SiblingTrainer, _SIDES), "flips": (FlipLessons, _SIDES),
}  # fmt: skip
"""Pictures as found; left and right, on pictures as they were taken; what a told flip does to them."""


def new_sibling(seed: int = 0) -> tuple[Any, ControlEmbedder]:
    """Transformer and embedder with seeded random weights."""
    transformer = build_transformer(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        return transformer, ControlEmbedder(ControlSpec(), control_width(transformer))


def train_sibling(
    weight: str, folder: str | Path, pictures: int, steps: int, batch: int, until: int | None = None,
    start: str | Path | None = None, lr: float = 1.5e-3, progress: Callable[[str], Progress] = lambda name: silent,
    lesson: str = "collection",
) -> Path:  # fmt: skip
    """Data, training, export to ``folder/weight``; goes on where it was stopped.

    Args:
        lesson: one of ``LESSONS``; exports of others than the collection have its name added.
        start: a sibling to begin with, by name or folder, instead of random weights.
        lr: of Adam; falls to zero over the last quarter.
    """
    from ...engine.portraits import load_portraits
    from ..portraits.transformer import saved_data

    trainer_of, kind = LESSONS[lesson]
    portraits, name = load_portraits(), weight if lesson == "collection" else f"{weight}-{lesson}"
    file = Path(folder) / f"pictures-{kind.mirrored:g}-mirrored-{kind.sides:g}-sided.safetensors"
    data = saved_data(file, portraits, pictures, progress=progress("pictures"), kind=kind)
    with torch.no_grad():
        null = portraits.encode([""])[0].clone()
    ema = 0.99 if lesson == "flips" else 0.999  # what a flip does is found suddenly; an older average has not got it
    config = ControlTrainConfig(steps, batch, lr, (0.9, 0.95), ema, gamma=WEIGHTS[weight], save_every=250)
    transformer, embedder = new_sibling() if start is None else load_sibling(start)[:2]
    embedder.float().train().requires_grad_(True)
    schedule = NoiseSchedule.from_diffusers(portraits.scheduler)
    transformer.train().requires_grad_(True)
    trainer = trainer_of(transformer, embedder, data, null, schedule, config, Path(folder) / f"{name}.run")
    bar, last = progress("training"), min(steps, until or steps)
    while trainer.done < last:
        trainer.step()
        if trainer.done % config.save_every == 0 or trainer.done == last:
            trainer.save()
        bar(trainer.done, steps, None)
    return export_sibling(trainer, Path(folder), name).parent
