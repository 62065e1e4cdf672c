"""Train the LoRAs of a space, M subjects at a time, each exactly as if it were trained alone.

DreamBooth's objective (Ruiz et al. 2023) as the paper uses it: noise prediction on a few pictures of one subject, one
prompt, AdamW, every model from the same initial weights. Random numbers belong to the subject, gradients are clipped
for each model by itself, and AdamW works number by number, so results do not depend on who shares the batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..condition import Condition
from ..config import Config
from ..denoiser import Denoiser
from ..errors import refuse
from ..files import write_json
from ..narrow_heads import NarrowHeads
from ..progress import Progress, silent
from .batched_lora import PAPER_TARGETS, BatchedLora, initial_lora
from .export import write_lora
from .manifest import Manifest


@dataclass(frozen=True)
class LoraTrainConfig(Config):
    """The paper's recipe (its train.sh); ``batch`` and ``steps`` are what one usually changes.

    Attributes:
        rank, alpha: of every layer; the update is scaled by alpha / rank.
        targets: ends of module paths.
        steps, batch: optimiser steps, and pictures of one subject in each.
        lr, weight_decay, clip: AdamW, and the gradient norm allowed to one model.
        schedule: of the learning rate: ``constant`` as in the paper, or ``cosine`` to zero, for short runs.
        seed: of the common start and, with the subject's own number, of the draws.
        weighting: ``uniform`` as in the paper, or ``debiased`` by 1 / sqrt(SNR) up to 4 (Yu et al. 2023), which the
            portraits model itself was trained with.
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
    """The pictures of one identity, encoded.

    Attributes:
        name: of the LoRA file.
        latents: (n, C, H, W) scaled posterior means.
        cond: n rows (each picture's own prompt), or one row for all.
        number: seeds this subject's draws. Subjects with one number draw the same pictures, times and noise, as the
            paper's do (seed 0 for every model): their weights then differ by who they are and by nothing else.
        deviations: (n, C, H, W) of the posterior, scaled; None trains on the means.
    """

    name: str
    latents: torch.Tensor
    cond: Condition
    number: int
    deviations: torch.Tensor | None = None

    def draw(self, batch: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Condition]:
        """x0 (b, C, H, W), t (b,), noise (b, C, H, W) and the prompts of one step, all from ``random``."""
        rows = torch.randint(len(self.latents), (batch,), generator=random)
        t = torch.randint(1000, (batch,), generator=random)
        x0 = self.latents[rows]
        noise = torch.randn(x0.shape, generator=random)
        if self.deviations is not None:
            x0 = x0 + self.deviations[rows] * torch.randn(x0.shape, generator=random)
        return x0, t, noise, self.cond.take(rows)


class BatchedTrainer:
    """M subjects on one frozen backbone. ``weights`` is the (M, D) leaf."""

    def __init__(self, model: Denoiser, subjects: Sequence[Subject], config: LoraTrainConfig) -> None:
        self.model, self.subjects, self.config = model, list(subjects), config
        start = initial_lora(model.backbone, config.targets, config.rank, config.alpha, config.seed)
        self.manifest = Manifest.of(start)
        self.device = next(model.backbone.parameters()).device
        flat = self.manifest.flatten(start).to(self.device)
        self.weights = flat.expand(len(self.subjects), -1).clone().requires_grad_()
        self.adam = torch.optim.AdamW([self.weights], config.lr, weight_decay=config.weight_decay)
        self.done = 0
        self.random = [torch.Generator().manual_seed(config.seed * 1_000_003 + s.number) for s in self.subjects]

    def step(self) -> torch.Tensor:
        """One optimiser step; (M,) losses."""
        drawn = [s.draw(self.config.batch, g) for s, g in zip(self.subjects, self.random, strict=True)]
        x0, t, noise = (torch.cat(part).to(self.device) for part in list(zip(*drawn, strict=True))[:3])
        cond = Condition.batch([d[3] for d in drawn]).to(self.device)
        with BatchedLora(self.model.backbone, self.manifest, self.weights), NarrowHeads():
            found = self.model.predict(self.model.network_input(x0, noise, t), t, cond).eps
        error = (found - noise).square().flatten(1).mean(1) * self._importance(t)
        losses = error.view(len(self.subjects), -1).mean(1)
        losses.sum().backward()
        self._clip()
        for group in self.adam.param_groups:
            group["lr"] = self.rate(self.done)
        self.adam.step()
        self.adam.zero_grad()
        self.done += 1
        return losses.detach()

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if self.config.schedule == "constant":
            return self.config.lr
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * step / self.config.steps))

    def _importance(self, t: torch.Tensor) -> torch.Tensor:
        if self.config.weighting == "uniform":
            return torch.ones(len(t), device=t.device)
        signal, noise = self.model.schedule.scales(t)
        return (noise / signal).clamp(max=4.0).to(t.device, torch.float32)

    def _clip(self) -> None:
        """The norm of each model by itself: one model's huge gradient must not scale the others."""
        assert self.weights.grad is not None
        norms = self.weights.grad.norm(dim=1, keepdim=True)
        self.weights.grad.mul_((self.config.clip / (norms + 1e-6)).clamp(max=1.0))

    def loras(self) -> list[dict]:
        """Each subject's LoRA."""
        return [self.manifest.lora(row) for row in self.weights.detach().cpu()]


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
    """Train every subject whose file is not in ``folder`` yet, ``together`` at a time; kohya files, written whole.

    Args:
        subjects: makers, called when their turn comes, so that a large set is never encoded at once.
        share: (this process, of how many): every n-th subject is its own.

    Raises:
        VitrineError: the folder holds LoRAs trained with other settings.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _same_settings(folder, config)
    makers = list(subjects)
    mine = range(share[0], len(names), share[1])  # not of what is left: other processes are at work on that
    left = [i for i in mine if not (folder / f"{names[i]}.safetensors").is_file()]
    count = max(1, math.ceil(len(left) / together))
    groups = [group.tolist() for group in np.array_split(left, count)] if left else []  # of even sizes
    done, total = 0, len(left) * config.steps
    for group in groups:
        began = time.perf_counter()
        trainer = BatchedTrainer(model, [makers[i]() for i in group], config)
        for _ in range(config.steps):
            losses = trainer.step()
            done += len(group)
            progress(done, total, None)
        seconds = (time.perf_counter() - began) / len(group)
        for i, lora, loss in zip(group, trainer.loras(), losses.tolist(), strict=True):
            facts = {"steps": config.steps, "loss": round(loss, 5), "seconds": round(seconds, 2)}
            head = {"vitrine": json.dumps(facts | {"settings": config.to_dict()})}
            write_lora(folder / f"{names[i]}.safetensors", lora, metadata=head)
    return [folder / f"{name}.safetensors" for name in names]


def _same_settings(folder: Path, config: LoraTrainConfig) -> None:
    note, settings = folder / "settings.json", config.to_dict()
    if note.is_file() and json.loads(note.read_text()) != settings:
        raise refuse("folder", folder.name, "LoRAs trained with these settings", "choose another folder")
    write_json(note, settings)
