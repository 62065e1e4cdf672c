"""The sampling loop over the timesteps of a diffusers scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from .denoiser import Denoiser
from .guidance import guide

Revise = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(step, t, x after it) -> the x that sampling continues from."""
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x_t, t) -> the network's prediction, as the scheduler's ``step`` takes it."""


def sampling_loop(
    predict: Predict,
    x: torch.Tensor,
    scheduler: Any,
    *,
    progress: Progress = silent,
    revise: Revise | None = None,
    **extra: Any,
) -> torch.Tensor:
    """Runs a scheduler from x (B, ...) at its first timestep to the clean sample of the same shape.

    Args:
        scheduler: a diffusers scheduler whose timesteps have been set.
        revise: called after each step.
        extra: arguments of ``scheduler.step``, such as ``eta`` or ``generator``.
    """
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(predict(x, t), t, x, **extra).prev_sample
        x = x if revise is None else revise(i, t, x)
        progress(i + 1, len(scheduler.timesteps), None)
    return x


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    noise: torch.Tensor,
    scheduler: Any,
    steps: int,
    cond: Condition,
    *,
    null: Condition | None = None,
    guidance: float = 1.0,
    progress: Progress = silent,
) -> torch.Tensor:
    """Noise (B, C, H, W) -> latents of the same shape, with classifier-free guidance as one batch of 2 B rows.

    Args:
        scheduler: a diffusers scheduler of the denoiser's own convention; its timesteps are set here, those of flow
            models from 1 to 1 / steps before any shift, as diffusers' pipelines do.
        null: what guidance starts from (the empty prompt, B rows or one); not needed at guidance 1.
    """
    guided = null is not None and guidance != 1
    both = Condition.batch([cond, null.take(torch.arange(len(noise)))]) if null is not None and guided else cond
    flow = denoiser.schedule.kind == "flow"
    if flow:
        scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    else:
        scheduler.set_timesteps(steps)

    def predict(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x, x]) if guided else x
        rows = rows if flow else scheduler.scale_model_input(rows, t)
        output = denoiser.forward(rows, float(t), both).to(torch.promote_types(x.dtype, torch.float32))
        if not guided:
            return output
        full, empty = output.chunk(2)
        return guide(empty, full, guidance)

    return sampling_loop(predict, noise if flow else noise * scheduler.init_noise_sigma, scheduler, progress=progress)


def few_step_latents(
    denoiser: Denoiser,
    noise: torch.Tensor,
    steps: int,
    cond: Condition,
    *,
    null: Condition | None = None,
    guidance: float = 1.0,
    shift: float = 1.0,
    progress: Progress = silent,
) -> torch.Tensor:
    """Noise (B, C, H, W) -> latents, by DDIM with eta 0, which is Euler's method for a flow, without a scheduler.

    The timesteps are those of diffusers' "trailing" spacing: they divide the whole range and start at its noisiest end.
    A denoiser gives the same samples in diffusers and in ComfyUI.

    Args:
        null: what guidance starts from (B rows or one); not needed at guidance 1, which takes one UNet evaluation per
            step.
        shift: of a flow's times towards noise (Esser et al. 2024, Eq. 23); 1 changes nothing.
    """
    schedule = denoiser.schedule
    total, flow, times = schedule.steps, schedule.kind == "flow", [1 - i / steps for i in range(steps)]
    if flow:
        times = [total * shift * s / (1 + (shift - 1) * s) for s in times]
    else:
        times = [float(round(total * s) - 1) for s in times]
    rows, x = torch.arange(len(noise)), noise.float()
    full, empty = cond.take(rows), None if null is None or guidance == 1 else null.take(rows)
    together = empty is not None and full.alike(empty)
    for step, t in enumerate(times):
        if empty is None:
            eps, clean = denoiser.predict(x, t, full)
        else:
            both = (
                [denoiser.predict(torch.cat([x, x]), t, Condition.batch([full, empty]))]
                if together
                else [denoiser.predict(x, t, full), denoiser.predict(x, t, empty)]
            )
            (eps, null_eps), (clean, null_clean) = (
                torch.cat([getattr(p, name) for p in both]).chunk(2) for name in ("eps", "x0")
            )
            # both are linear in the network's output, so guiding each equals guiding the output
            eps, clean = guide(null_eps, eps, guidance), guide(null_clean, clean, guidance)
        if step + 1 == steps:
            x = clean
        else:
            signal, level = (s.to(x.device, x.dtype) for s in denoiser.schedule.scales(times[step + 1]))
            x = signal * clean + level * eps  # Song et al. 2021, Eq. 12, with eta = 0
        progress(step + 1, steps, None)
    return x
