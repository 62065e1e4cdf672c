"""Sampling under Eq. 1 and Eq. 2 of Berrada et al. 2024: one network batch per step, with a log of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..diffusion.sampling import Revise, sampling_loop
from ..diffusion.schedule import NoiseSchedule
from ..families import call_of
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from .embedder import ControlEmbedder
from .embedding_hook import Injection
from .gamma import GammaConfig
from .reference_blend import Reference, ReferenceBlend
from .size_guidance import ControlStep, GuidanceConfig, Key, control_guidance, needed_evaluations


@dataclass(frozen=True)
class ControlledSampling:
    """Everything that one sampling run needs.

    Attributes:
        backbone: a diffusers UNet or transformer.
        conditions: (with control, with semantics) -> condition of ``count`` rows.
        count: number of images.
        high_is_null: no image has a high-level control, see :func:`control_guidance`.
        embedder, values: of a control checkpoint, and (count, F) values; None blends training-free.
        reference, pixels: of the training-free blend, see :class:`ReferenceBlend`.
    """

    backbone: nn.Module
    gamma: GammaConfig
    guidance: GuidanceConfig
    conditions: Mapping[Key, Condition]
    count: int
    high_is_null: bool
    embedder: ControlEmbedder | None = None
    values: torch.Tensor | None = None
    reference: Reference = "target"
    pixels: int = 8

    def run(
        self,
        noise: torch.Tensor,
        scheduler: Any,
        *,
        progress: Progress = silent,
        revise: Revise | None = None,
        **extra: Any,
    ) -> tuple[torch.Tensor, list[ControlStep]]:
        """Scaled noise (count, C, H, W) -> (latents of the same shape, log of the steps).

        Args:
            scheduler: a diffusers scheduler whose timesteps have been set.
            revise: called after each step, see :func:`~vitrine.engine.diffusion.sampling.sampling_loop`.
            extra: arguments of ``scheduler.step``, such as ``eta`` or ``generator``.
        """
        sigmas, call = step_sigmas(scheduler), call_of(self.backbone)
        times = scheduler.timesteps.tolist()  # read once, to avoid a synchronisation per step
        weights = self.gamma.at(scheduler.timesteps).tolist()
        batches: dict[tuple[Key, ...], tuple[AbstractContextManager, Condition]] = {}
        block_open = _OpenBlock()
        log: list[ControlStep] = []

        def predict(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            time, weight = times[len(log)], weights[len(log)]
            keys = needed_evaluations(self.guidance, weight, self.high_is_null)
            if keys not in batches:
                batches[keys] = self._batch(keys)
            block, cond = batches[keys]
            rows = scheduler.scale_model_input(torch.cat([x] * len(keys)), t)
            block_open.open(block)
            output = call(rows, t.expand(len(rows)), cond)
            predictions = dict(zip(keys, output.chunk(len(keys)), strict=True))
            guided = control_guidance(lambda *key: predictions[key], self.guidance, weight, self.high_is_null)
            log.append(ControlStep(float(time), sigmas[len(log)], weight, guided.evaluations))
            return guided.prediction

        def revised(step: int, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            block_open.close()  # a callback may call the network itself
            return revise(step, t, x) if revise else x

        with block_open:
            return sampling_loop(
                predict, noise, scheduler, progress=progress, revise=revised if revise else None, **extra
            ), log

    def _batch(self, keys: tuple[Key, ...]) -> tuple[AbstractContextManager, Condition]:
        """The context manager that weights the control, and the condition, for one set of evaluations."""
        cond = Condition.batch([self.conditions[key] for key in keys])
        drop = torch.tensor([not control for control, _ in keys]).repeat_interleave(self.count)
        if self.embedder is None or self.values is None:
            return ReferenceBlend(self.backbone, self.gamma, self.reference, self.pixels, drop), cond
        return Injection(self.backbone, self.embedder, self.values.repeat(len(keys), 1), self.gamma, drop), cond


class _OpenBlock(AbstractContextManager):
    """Keeps a context manager open across steps until another is requested, since opening one is slow."""

    def __init__(self) -> None:
        self._block: AbstractContextManager | None = None

    def open(self, block: AbstractContextManager) -> None:
        """Open it unless it is already open."""
        if block is not self._block:
            self.close()
            block.__enter__()
            self._block = block

    def close(self) -> None:
        """Close the open one; idempotent."""
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        self.close()


def step_sigmas(scheduler: Any) -> list[float]:
    """sigma of each step of a diffusers scheduler: its own if it has them."""
    count, sigmas = len(scheduler.timesteps), getattr(scheduler, "sigmas", None)
    if sigmas is not None and len(sigmas) == count + 1:
        return sigmas[:count].tolist()
    return NoiseSchedule.from_diffusers(scheduler).sigma(scheduler.timesteps.cpu()).tolist()
