"""Training the LoRAs of a space, M subjects at a time, each exactly as if it were trained alone.

DreamBooth's objective (Ruiz et al. 2023) as the paper uses it: noise prediction on a few pictures of one subject, one
prompt, AdamW, every model from the same initial weights; networks that predict something else, v or a flow's velocity,
are trained on that. Random numbers belong to the subject, gradients are clipped per model, and AdamW works element by
element, so results do not depend on who shares the batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..condition import Condition
from ..config import Config
from ..denoiser import Denoiser
from ..errors import refuse
from ..files import KEY, named, parse_table, write_json
from ..finite import FiniteLosses
from ..lora_layer import LoraLayer
from ..lora_writing import write_lora
from ..narrow_heads import NarrowHeads
from ..noise import generators
from ..ownership import sole_owner
from ..placement import refuse_offloaded
from ..progress import Progress, silent
from ..training import set_rate
from .batched_lora import PAPER_TARGETS, BatchedLora, initial_lora
from .manifest import Manifest


@dataclass(frozen=True)
class LoraTrainConfig(Config):
    """The paper's recipe (its train.sh); usually only ``batch`` and ``steps`` are changed.

    Attributes:
        rank, alpha: of every layer; the update is scaled by alpha / rank.
        targets: ends of module paths.
        steps, batch: optimiser steps, and pictures of one subject in each.
        lr, weight_decay: of AdamW.
        clip: largest gradient norm of one model.
        schedule: of the learning rate: ``constant`` as in the paper, or ``cosine`` to zero, for short runs.
        seed: of the common start and, with the subject's own number, of its draws.
        weighting: of the loss: ``uniform`` as in the paper, on the network's own output, or ``debiased``, by
            1 / sqrt(SNR) up to 4 (Yu et al. 2023), as the portraits model was trained. That weighs the error in eps
            whatever the network predicts, so that a flow's velocity has s (1 - s), little at both ends.

    Raises:
        VitrineError: If a value is outside its range.
    """

    rank: int = 1
    alpha: float = 27.0
    targets: tuple[str, ...] = PAPER_TARGETS
    steps: int = 800
    batch: int = 1
    lr: float = 1e-4
    weight_decay: float = 1e-2
    clip: float = 1.0
    schedule: str = "constant"
    seed: int = 0
    weighting: str = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        for name in ("rank", "steps", "batch"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        if self.schedule not in ("constant", "cosine"):
            raise refuse("schedule", self.schedule, ("constant", "cosine"), "constant is the paper's")
        if self.weighting not in ("uniform", "debiased"):
            raise refuse("weighting", self.weighting, ("uniform", "debiased"), "uniform is the paper's")
        if min(self.lr, self.alpha, self.clip) <= 0:
            raise refuse("lr, alpha, clip", (self.lr, self.alpha, self.clip), "above 0", "1e-4, 27 and 1 are usual")


@dataclass(frozen=True)
class Subject:
    """The encoded pictures of one identity.

    Attributes:
        name: of the LoRA file.
        latents: (n, C, H, W) scaled posterior means.
        cond: n rows (a prompt per picture), or one row for all.
        number: seeds this subject's draws. Subjects with one number draw the same pictures, timesteps and noise, as in
            the paper (seed 0 for every model): their weights then differ by identity alone.
        deviations: (n, C, H, W) of the posterior, scaled; None trains on the means.
    """

    name: str
    latents: torch.Tensor
    cond: Condition
    number: int
    deviations: torch.Tensor | None = None

    def draw(self, batch: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Condition]:
        """x0 (b, C, H, W), t (b,), noise (b, C, H, W) and the prompts of one step, all from ``random``."""
        picture = torch.randint(len(self.latents), (batch,), generator=random)
        t = torch.randint(1000, (batch,), generator=random)
        x0 = self.latents[picture]
        noise = torch.randn(x0.shape, generator=random)
        if self.deviations is not None:
            x0 = x0 + self.deviations[picture] * torch.randn(x0.shape, generator=random)
        return x0, t, noise, self.cond.take(picture)


class BatchedTrainer:
    """Trains M subjects on one frozen backbone.

    Attributes:
        weights: (M, D) the leaf in training, in the order of ``manifest``.
        optimizer: AdamW on it.
        done: optimiser steps so far.

    Raises:
        VitrineError: If the backbone is offloaded.
    """

    def __init__(self, model: Denoiser, subjects: Sequence[Subject], config: LoraTrainConfig) -> None:
        refuse_offloaded(model.backbone)
        self.model, self.subjects, self.config = model, list(subjects), config
        start = initial_lora(model.backbone, config.targets, config.rank, config.alpha, config.seed)
        self.manifest = Manifest.of(start)
        self.device = next(model.backbone.parameters()).device
        flat = self.manifest.flatten(start).to(self.device)
        self.weights = flat.expand(len(self.subjects), -1).clone().requires_grad_()
        self.optimizer = torch.optim.AdamW([self.weights], config.lr, weight_decay=config.weight_decay)
        self.done = 0
        self._finite = FiniteLosses("loss of a LoRA's training")
        self._random = generators([config.seed * 1_000_003 + s.number for s in self.subjects])

    def step(self) -> torch.Tensor:
        """One optimiser step; (M,) losses."""
        losses = self.losses()
        self._finite.see(losses)
        losses.sum().backward()
        self._clip()
        config = self.config
        set_rate(self.optimizer, learning_rate(config.lr, config.schedule, self.done, config.steps))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return losses.detach()

    def losses(self) -> torch.Tensor:
        """(M,) losses on freshly drawn pictures, timesteps and noise."""
        draws = [s.draw(self.config.batch, g) for s, g in zip(self.subjects, self._random, strict=True)]
        x0, t, noise = (torch.cat(tensors).to(self.device) for tensors in list(zip(*draws, strict=True))[:3])
        cond = Condition.batch([draw[3] for draw in draws]).to(self.device)
        with BatchedLora(self.model.backbone, self.manifest, self.weights), NarrowHeads():
            x_t = self.model.network_input(x0, noise, t)
            output = self.model.forward(x_t, t, cond)
        error = self.model.error(output, x_t, x0, noise, t).square().flatten(1).mean(1)
        error = error * self._loss_weight(t)
        return error.view(len(self.subjects), -1).mean(1)

    def _loss_weight(self, t: torch.Tensor) -> torch.Tensor:
        if self.config.weighting == "uniform":
            return torch.ones(len(t), device=t.device)
        signal, level = self.model.schedule.scales(t)
        weight = (level / signal).clamp(max=4.0)  # of the squared error in eps, which outputs enlarge by:
        square = signal.square()
        enlarged = {"eps": torch.ones_like(square), "x0": square / level.square()}.get(self.model.prediction, square)
        return (weight * enlarged).to(t.device, torch.float32)

    def _clip(self) -> None:
        """Clips each model's own gradient norm: a huge one must not scale the others down."""
        assert self.weights.grad is not None
        norms = self.weights.grad.norm(dim=1, keepdim=True)
        self.weights.grad.mul_((self.config.clip / (norms + 1e-6)).clamp(max=1.0))

    def loras(self) -> list[dict[str, LoraLayer]]:
        """The LoRA of each subject."""
        return [self.manifest.lora(row) for row in self.weights.detach().cpu()]


def learning_rate(base: float, schedule: str, step: int, steps: int) -> float:
    """The rate of step 0 .. ``steps`` - 1: ``constant``, or ``cosine`` from ``base`` to zero."""
    return base if schedule == "constant" else base * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_loras(
    model: Denoiser,
    subjects: Iterable[Callable[[], Subject]],
    names: Sequence[str],
    folder: str | Path,
    config: LoraTrainConfig,
    *,
    together: int = 16,
    progress: Progress = silent,
    share: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Trains every subject that has no file in ``folder`` yet, ``together`` at a time; writes whole kohya files.

    Args:
        subjects: functions that make a subject when its turn comes, so that a large set is never encoded at once.
        share: (index of this process, of how many): it trains every n-th subject.

    Raises:
        VitrineError: If the folder holds LoRAs trained with other settings, or another run trains there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if share[0] else sole_owner(folder):  # the first process stands for all of its run
        _same_settings(folder, config)
        makers = list(subjects)
        mine = range(share[0], len(names), share[1])  # of all names: what is missing changes as other processes work
        missing = [i for i in mine if not (folder / f"{names[i]}.safetensors").is_file()]
        count = max(1, math.ceil(len(missing) / together))
        groups = [group.tolist() for group in np.array_split(missing, count)] if missing else []  # of even sizes
        done, total = 0, len(missing) * config.steps
        for group in groups:

            def after(steps: int, before: int = done, size: int = len(group)) -> None:
                progress(before + steps * size, total, None)

            _train_group(model, {names[i]: makers[i]() for i in group}, folder, config, after)
            done += len(group) * config.steps
    return [folder / f"{name}.safetensors" for name in names]


def _train_group(
    model: Denoiser, subjects: dict[str, Subject], folder: Path, config: LoraTrainConfig, after: Callable[[int], None]
) -> None:
    """Trains subjects in one batch and writes their files."""
    began = time.perf_counter()
    trainer = BatchedTrainer(model, list(subjects.values()), config)
    for step in range(config.steps):
        losses = trainer.step()
        after(step + 1)
    seconds = (time.perf_counter() - began) / len(subjects)
    for name, lora, loss in zip(subjects, trainer.loras(), losses.tolist(), strict=True):
        facts = {"steps": config.steps, "loss": round(loss, 5), "seconds": round(seconds, 2)}
        metadata = {KEY: json.dumps(facts | {"settings": config.to_dict()})}
        write_lora(folder / f"{name}.safetensors", lora, metadata=metadata)


def _same_settings(folder: Path, config: LoraTrainConfig) -> None:
    note, settings = folder / "settings.json", config.to_dict()
    if note.is_file():
        with named(note, "settings", "the settings of a training run", "choose another folder"):
            same = parse_table(note.read_text(encoding="utf-8")) == settings
        if not same:
            raise refuse("folder", folder.name, "LoRAs trained with these settings", "choose another folder")
    write_json(note, settings)
