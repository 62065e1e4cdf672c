"""One-step generation, and MCMC correction of its samples."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import RowNoise
from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .chain import Joint, NoiseLevels, e_step
from .chain_config import EStepConfig
from .losses import score_difference
from .student_preset import StudentPreset


def noise_scale(schedule: NoiseSchedule, preset: StudentPreset) -> float:
    """The factor on z at the network's input.

    ``unit`` is 1; ``vp`` is sigma_vp(t*); ``edm`` is sigma / sqrt(1 + sigma^2), after the input scaling of a VP
    network, which is the same number. At t* = 399 of Stable Diffusion, unit and vp differ by 24 %.
    """
    if preset.noise == "unit":
        return 1.0
    sigma = schedule.sigma(preset.timestep)
    if preset.noise == "edm" and schedule.kind == "vp":
        return float(sigma / torch.sqrt(1 + sigma.square()))
    return float(schedule.scales(preset.timestep)[1])


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
        scale = torch.full(
            (len(z),), preset.trained_guidance, device=z.device
        )  # consistency models have a guidance embedding
        cond = replace(cond, extra={"guidance": scale} | cond.extra)
    if preset.prediction not in ("model", student.prediction):
        student = replace(student, prediction=preset.prediction)
    u = z.to(wide) * noise_scale(student.schedule, preset)
    # Xie et al. 2024, initialisation from the teacher: g(z) is its x0 prediction at a fixed time
    return student.predict(u, preset.timestep, cond).x0.to(wide)


@dataclass(frozen=True)
class CorrectConfig(Config):
    """Settings of the MCMC correction of one-step samples.

    Attributes:
        steps: Langevin steps; 0 leaves the sample unchanged. The paper shows 300.
        timestep: noise level of the chain; a higher level moves the sample further.
        ge, gz: step sizes of eps and z; gz 0 freezes z and needs no autograd.
        guidance: of the teacher; 0 takes that of the student's training, from its preset.
        clip: largest RMS of a batch row's z drift.
    """

    steps: int = 16
    timestep: float = 399.0
    ge: float = 0.16
    gz: float = 0.0
    guidance: float = 0.0
    clip: float = 10.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise refuse("steps", self.steps, "0 or more", "0 leaves the sample unchanged")
        if self.guidance < 0:
            raise refuse("guidance", self.guidance, "0 or more", "0 takes that of the student's training")
        self.chain(1)

    def chain(self, steps: int | None = None) -> EStepConfig:
        """The settings as an E-step."""
        return EStepConfig(steps or self.steps, self.ge, self.gz, "cancel", self.clip)


class Networks(NamedTuple):
    """The three roles: one-step generator, teacher, and the student's score network."""

    generator: Denoiser
    teacher: Denoiser
    score: Denoiser


class RepairWarning(UserWarning):
    """The correction has another target than the student's training."""


def repair_guidance(config: CorrectConfig, preset: StudentPreset, with_null: bool) -> float:
    """The teacher's guidance in a correction: as requested, else as in the student's training.

    Warns if the two differ, since the chain then has another target than the distillation. Without the empty
    prompt (``with_null`` False) the guidance is 1.
    """
    trained = preset.trained_guidance
    used = config.guidance or (trained if trained and with_null else 1.0)
    if trained and used != trained:
        reason = "" if config.guidance else "; give the empty prompt as well"
        warnings.warn(
            f"repair at guidance {used:g}, the student was distilled at {trained:g}: another target{reason}",
            RepairWarning,
            stacklevel=3,
        )
    return used


def correct(
    networks: Networks, z: torch.Tensor, cond: Condition, preset: StudentPreset, config: CorrectConfig,
    seeds: list[int], null: Condition | None = None, progress: Progress = silent,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs the joint chain from a sample towards the teacher's density, then removes noise (Xie et al. 2024, Fig. 1).

    Args:
        networks: with another score network than the student's, the chain has another target.
        z: (B, C, H, W) the sample's z, as passed to :func:`one_step`.
        seeds: one per image, for the chain's noise.
        null: the empty prompt, needed if guidance is not 1; see :func:`repair_guidance`.

    Returns:
        (x0, z^K): x0 = g(z^K) + (sigma / alpha) r, float32. With 0 steps, ``one_step`` bit for bit.
    """
    generator, teacher, score = networks
    if config.steps == 0:
        with torch.no_grad():
            return one_step(generator, z, cond, preset), z
    z, noise_like = z.float(), RowNoise(seeds).like
    t = torch.full((len(z),), config.timestep, dtype=torch.float64)

    def net(u: torch.Tensor) -> torch.Tensor:
        return one_step(generator, u, cond, preset)

    guidance = repair_guidance(config, preset, null is not None)
    difference = score_difference(teacher, score, t, cond, null, guidance)
    alpha, sigma = levels = NoiseLevels.at(teacher.schedule, t, z)
    rho = Joint(net, difference, levels)
    end = e_step(rho, z, noise_like(z), config.chain(), noise_like, lambda done, x0: progress(done, config.steps, x0))
    with torch.no_grad():
        # Xie et al. 2024, noise cancelled: x = alpha g(z^K) + sigma r, divided by alpha
        return net(end.z) + (sigma / alpha) * end.r, end.z
