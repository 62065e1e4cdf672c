"""Sampling of students of one step and of several.

The base model may take the first steps of several, which restores its variety.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import RowNoise
from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from ..settings.option import Option, Options
from .students import StudentPreset, StudentSampling


def noise_scale(schedule: NoiseSchedule, preset: StudentPreset) -> float:
    """The factor on z at the network's input.

    ``unit`` is 1; ``vp`` is sigma_vp(t*). At t* = 399 of Stable Diffusion they differ by 24 %.
    """
    return 1.0 if preset.noise == "unit" else float(schedule.scales(preset.timestep)[1])


def one_step(student: Denoiser, z: torch.Tensor, cond: Condition, preset: StudentPreset) -> torch.Tensor:
    """x0 = g(z, c), exactly one network call: the teacher's x0 prediction at t* with z as the noisy image.

    Args:
        student: the generator with its base's prediction type; the preset's takes precedence.
        z: (B, C, H, W) standard normal.
        cond: one row per image; there is no negative prompt, since guidance is distilled in.
        preset: t* and noise convention.

    Returns:
        (B, C, H, W) float32 latents in the scale of the diffusion model.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    if preset.trained_guidance and getattr(getattr(student.backbone, "config", None), "time_cond_proj_dim", None):
        scale = torch.full((len(z),), preset.trained_guidance, device=z.device)  # a consistency model's embedding
        cond = replace(cond, extra={"guidance": scale} | cond.extra)
    if preset.prediction not in ("model", student.prediction):
        student = replace(student, prediction=preset.prediction)
    u = z.to(wide) * noise_scale(student.schedule, preset)
    # Xie et al. 2024, initialisation from the teacher: g(z) is its x0 prediction at a fixed time
    return student.predict(u, preset.timestep, cond).x0.to(wide)


@dataclass(frozen=True)
class FirstSteps(Options):
    """First steps by the base (Gandikota & Bau 2025, Diversity Distillation: distilled networks fix the layout first).

    Base steps are evenly spaced over the interval of those that they replace.
    """

    replaces: Annotated[
        int,
        Option(
            "How many of the student's steps, from the first, the base takes: more give more variety, and more of the "
            "base's blur at few steps.",
            ge=1,
            top=7,
            remedy="one for one gives most for least",
        ),
    ] = 1
    steps: Annotated[int, Option("Number of base steps; 0: as many as it replaces.", ge=0)] = 0


class Base(NamedTuple):
    """The base model for the first steps, unguided, and its prompt (for example with noise)."""

    denoiser: Denoiser
    cond: Condition
    first: FirstSteps = FirstSteps()


@torch.no_grad()
def few_steps(
    student: Denoiser,
    z: torch.Tensor,
    cond: Condition,
    sampling: StudentSampling,
    seeds: list[int],
    base: Base | None = None,
    progress: Progress = silent,
) -> torch.Tensor:
    """x0 of a student of one or more steps: one network call each.

    Args:
        student: with its base's prediction type; the student's own takes precedence.
        z: (B, C, H, W) standard normal.
        cond: one row per image.
        seeds: one per image, for the fresh noise of ``lcm``, ``tcd`` and ``euler_ancestral``.
        base: the model that takes the first steps, if not the student.

    Returns:
        (B, C, H, W) float32 latents in the scale of the diffusion model.
    """
    times, first = sampling.timesteps, 0 if base is None else base.first.replaces
    if first >= len(times):
        accepted = f"fewer than its {len(times)} steps"
        raise refuse("replaces", first, accepted, "a one-step student has no further step")
    wide, noise_like = torch.promote_types(z.dtype, torch.float32), RowNoise(seeds).like
    noise_like(z)  # the first sample of a seed is z itself
    if sampling.prediction not in ("model", student.prediction):
        student = replace(student, prediction=sampling.prediction)
    if sampling.trained_guidance and "guidance" not in cond.extra:
        scale = torch.full((len(z),), sampling.trained_guidance, device=z.device)
        cond = replace(cond, extra=cond.extra | {"guidance": scale})
    start = StudentPreset(timestep=times[0], noise="vp" if sampling.sampler.startswith("euler") else "unit")
    x = z.to(wide) * noise_scale(student.schedule, start)
    if base is not None:
        x = _begun(base, x, times, progress)
    x0 = x
    for i in range(first, len(times)):
        eps, x0 = student.predict(x, times[i], cond)
        if i + 1 < len(times):
            kept, fresh = sampling.split(student.schedule, times[i], times[i + 1])
            x = x0 + kept * eps
            if fresh:
                x = x + fresh * noise_like(x0).to(x)
            x = float(student.schedule.scales(times[i + 1])[0]) * x
        progress(i + 1, len(times), x0)
    return x0.to(wide)


def _begun(base: Base, x: torch.Tensor, times: tuple[float, ...], progress: Progress) -> torch.Tensor:
    """The base's trajectory from the student's first level to the student's start: DDIM, or Euler on a flow."""
    net, first = base.denoiser, base.first
    count = first.steps or first.replaces
    end = times[first.replaces]
    if not first.steps:
        path = list(times[: first.replaces + 1])
    else:
        path = [times[0] + (end - times[0]) * k / count for k in range(count + 1)]
        if net.schedule.kind == "vp":
            path = [float(round(t)) for t in path]  # a noise-predicting network has integer timesteps
    for k, (t, following) in enumerate(zip(path, path[1:], strict=False)):
        signal, noise = (float(s) for s in net.schedule.scales(following))
        eps, x0 = net.predict(x, t, base.cond)
        x = signal * x0 + noise * eps
        progress(min(k + 1, first.replaces), len(times), x0)
    return x
