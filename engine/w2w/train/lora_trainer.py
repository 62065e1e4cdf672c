"""Trains the LoRAs of a space, M subjects at a time, each exactly as if trained alone.

DreamBooth's objective (Ruiz et al. 2023) as in the paper: noise prediction on a few images of one subject, one
prompt, AdamW, every model from the same initial weights; networks that predict v or a flow's velocity
are trained on that. Random numbers depend on the subject, gradients are clipped per model, and AdamW is
elementwise, so results do not depend on the batch.
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

from ...diffusion.denoiser import Denoiser
from ...diffusion.noise import generators
from ...io.file_names import safe_name
from ...io.files import KEY, named, parse_table
from ...io.lora_layer import LoraLayer
from ...io.lora_writing import write_lora
from ...jobs.digests import digest
from ...jobs.run import Run, other_inputs
from ...jobs.training import learning_rate, set_rate
from ...network.condition import Condition
from ...runtime.finite import FiniteLosses
from ...runtime.placement import refuse_offloaded
from ...runtime.processes import Workers
from ...runtime.progress import Progress, silent
from ...settings.w2w_options import LoraTrainConfig
from ..space.manifest import Manifest
from .batched_lora import BatchedLora, initial_lora


@dataclass(frozen=True)
class Subject:
    """The encoded images of one subject.

    Attributes:
        name: of the LoRA file.
        latents: (n, C, H, W) scaled posterior means.
        cond: n rows (a prompt per image), or one row for all.
        number: seed of this subject's random numbers. Subjects with one number sample the same images, timesteps and
            noise, as in the paper (seed 0 for every model): their weights then differ only by identity.
        deviations: (n, C, H, W) of the posterior, scaled; None trains on the means.
    """

    name: str
    latents: torch.Tensor
    cond: Condition
    number: int
    deviations: torch.Tensor | None = None

    def sample(self, batch: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Condition]:
        """x0 (b, C, H, W), t (b,), noise (b, C, H, W) and prompts of one step, sampled with ``random``."""
        picture = torch.randint(len(self.latents), (batch,), generator=random)
        t = torch.randint(1000, (batch,), generator=random)
        x0 = self.latents[picture]
        noise = torch.randn(x0.shape, generator=random)
        if self.deviations is not None:
            x0 = x0 + self.deviations[picture] * torch.randn(x0.shape, generator=random)
        return x0, t, noise, self.cond.take(picture)


@dataclass(frozen=True)
class SubjectMaker:
    """Makes a subject on demand, and has its inputs.

    Attributes:
        make: makes the subject.
        inputs: its files, prompts and their encoders, for a :class:`~vitrine.engine.jobs.run.Run`.
    """

    make: Callable[[], Subject]
    inputs: object

    def __call__(self) -> Subject:
        """The subject."""
        return self.make()


class BatchedTrainer:
    """Trains M subjects on one frozen backbone.

    Attributes:
        weights: (M, D) the trained leaf, in the order of ``manifest``.
        optimizer: AdamW on it.
        done: optimiser steps so far.
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
        """One optimiser step; returns (M,) losses."""
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
        """(M,) losses on newly sampled images, timesteps and noise."""
        batches = [s.sample(self.config.batch, g) for s, g in zip(self.subjects, self._random, strict=True)]
        x0, t, noise = (torch.cat(tensors).to(self.device) for tensors in list(zip(*batches, strict=True))[:3])
        cond = Condition.batch([sample[3] for sample in batches]).to(self.device)
        with BatchedLora(self.model.backbone, self.manifest, self.weights):
            x_t = self.model.network_input(x0, noise, t)
            output = self.model.forward(x_t, t, cond)
        error = self.model.error(output, x_t, x0, noise, t).square().flatten(1).mean(1)
        error = error * self._loss_weight(t)
        return error.view(len(self.subjects), -1).mean(1)

    def _loss_weight(self, t: torch.Tensor) -> torch.Tensor:
        if self.config.weighting == "uniform":
            return torch.ones(len(t), device=t.device)
        signal, level = self.model.schedule.scales(t)
        weight = (level / signal).clamp(max=4.0)  # for the squared error in eps, which the output scales by:
        square = signal.square()
        enlarged = {"eps": torch.ones_like(square), "x0": square / level.square()}.get(self.model.prediction, square)
        return (weight * enlarged).to(t.device, torch.float32)

    def _clip(self) -> None:
        """Clips each model's own gradient norm: a large one must not scale down the others."""
        assert self.weights.grad is not None
        norms = self.weights.grad.norm(dim=1, keepdim=True)
        self.weights.grad.mul_((self.config.clip / (norms + 1e-6)).clamp(max=1.0))

    def loras(self) -> list[dict[str, LoraLayer]]:
        """The LoRA of each subject."""
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
    part: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Trains every subject that has no file in ``folder`` yet, ``together`` at a time; writes kohya files atomically.

    Args:
        subjects: functions that make a subject on demand, so that a large set is never encoded at once;
            trained ones are made again and compared, unless they are :class:`SubjectMaker`.
        part: (index of this process, number of processes): it trains every n-th subject.
    """
    folder, makers = Path(folder), list(subjects)
    for name in names:
        safe_name(name, "name of a LoRA")
    inputs = {"model": model, "settings": config}
    with Run(folder, "LoRA training", inputs, ("*.safetensors",), Workers(*part)):
        mine = range(part[0], len(names), part[1])  # of all names: the missing ones change meanwhile
        count = max(1, math.ceil(len(mine) / together))  # groups of even sizes, the same after a kill
        groups = [group.tolist() for group in np.array_split(mine, count)] if mine else []
        missing = [[i for i in group if not _trained(folder, names[i], makers[i])] for group in groups]
        done, total = 0, sum(map(len, missing)) * config.steps
        for group in filter(None, missing):
            began, batch = time.perf_counter(), [makers[i]() for i in group]
            trainer = BatchedTrainer(model, batch, config)
            for _ in range(config.steps):
                losses = trainer.step()
                done += len(group)
                progress(done, total, None)
            seconds = (time.perf_counter() - began) / len(group)
            for i, subject, lora, loss in zip(group, batch, trainer.loras(), losses.tolist(), strict=True):
                facts = {"steps": config.steps, "loss": round(loss, 5), "seconds": round(seconds, 2)}
                facts |= {"settings": config.to_dict(), "made_of": _made_of(makers[i], subject)}
                write_lora(folder / f"{names[i]}.safetensors", lora, metadata={KEY: json.dumps(facts)})
    return [folder / f"{name}.safetensors" for name in names]


def _trained(folder: Path, name: str, maker: Callable[[], Subject]) -> bool:
    """Whether a subject has its file."""
    from safetensors import safe_open

    file = folder / f"{name}.safetensors"
    if not file.is_file():
        return False
    with named(file, "LoRA", "a whole file", "delete it, to train it again"), safe_open(str(file), "pt") as opened:
        made_of = parse_table((opened.metadata() or {}).get(KEY, "{}")).get("made_of")
    if made_of != _made_of(maker):
        raise other_inputs(folder, [f"other pictures or prompts of {name}"])
    return True


def _made_of(maker: Callable[[], Subject], subject: Subject | None = None) -> str:
    """The digest of a subject's inputs: those of its maker, else the subject itself."""
    return digest(maker.inputs if isinstance(maker, SubjectMaker) else subject or maker())
