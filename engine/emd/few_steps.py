"""Sampling of few-step students; the base model may take the first steps, which restores its variety."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..diffusion.denoiser import Denoiser, Prediction
from ..diffusion.guidance import guide
from ..diffusion.noise import RowNoise
from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .chain import NoiseLike
from .onestep import noise_scale
from .published_students import StudentSampling
from .student_preset import StudentPreset


@dataclass(frozen=True)
class FirstSteps(Config):
    """First steps by the base (Gandikota & Bau 2025, Diversity Distillation: distilled networks fix the layout first).

    Attributes:
        replaces: number of the student's first steps that the base replaces.
        steps: number of base steps over the same interval, evenly spaced; by default the same number.
        guidance: of the base; 1 is none, the best in the paper.
    """

    replaces: int = 1
    steps: int = 0
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.replaces < 1 or self.steps < 0:
            shown = (self.replaces, self.steps)
            raise refuse("replaces, steps", shown, "1 or more, 0 or more", "one for one gives most for least")


class Base(NamedTuple):
    """The base model for the first steps: its prompt (for example with noise) and the empty one, for guidance."""

    denoiser: Denoiser
    cond: Condition
    null: Condition | None = None
    first: FirstSteps = FirstSteps()


@torch.no_grad()
def few_steps(
    student: Denoiser, z: torch.Tensor, cond: Condition, sampling: StudentSampling, seeds: list[int],
    base: Base | None = None, progress: Progress = silent,
) -> torch.Tensor:  # fmt: skip
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
            x = _noised(Prediction(eps, x0), student.schedule, sampling.split(student.schedule, times[i], times[i + 1]),
                        times[i + 1], noise_like)  # fmt: skip
        progress(i + 1, len(times), x0)
    return x0.to(wide)


def _noised(
    seen: Prediction, schedule: NoiseSchedule, split: tuple[float, float], t: float, noise_like: NoiseLike
) -> torch.Tensor:
    """x at t: x0, a part of its noise, and fresh noise."""
    (kept, fresh), signal = split, float(schedule.scales(t)[0])
    x = seen.x0 + kept * seen.eps
    if fresh:
        x = x + fresh * noise_like(seen.x0).to(x)
    return signal * x


def _begun(base: Base, x: torch.Tensor, times: tuple[float, ...], progress: Progress) -> torch.Tensor:
    """The base's trajectory from the student's first level to the student's start: DDIM, or Euler on a flow."""
    net, first = base.denoiser, base.first
    if first.guidance != 1 and base.null is None:
        raise refuse(
            "guidance", first.guidance, "1 without an empty prompt", "encode the empty prompt, or use guidance 1"
        )
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
        eps, x0 = _guided(base, x, t)
        x = signal * x0 + noise * eps
        progress(min(k + 1, first.replaces), len(times), x0)
    return x


def _guided(base: Base, x: torch.Tensor, t: float) -> Prediction:
    net, guidance = base.denoiser, base.first.guidance
    if guidance == 1 or base.null is None:
        return net.predict(x, t, base.cond)
    rows = torch.arange(len(x))
    both = net.predict(torch.cat([x, x]), t, Condition.batch([base.cond.take(rows), base.null.take(rows)]))
    (full, empty), (full_x0, empty_x0) = (part.chunk(2) for part in both)
    return Prediction(guide(empty, full, guidance), guide(empty_x0, full_x0, guidance))
