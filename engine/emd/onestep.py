"""One-step generation, and the repair of its samples by the chain they were trained with."""

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
from .losses import score_gap
from .student_preset import StudentContract


def noise_scale(schedule: NoiseSchedule, contract: StudentContract) -> float:
    """The factor on z before the network sees it.

    ``unit`` is 1; ``vp`` is sigma_vp(t*); ``edm`` is sigma / sqrt(1 + sigma^2), after the input scaling of a VP
    network, which is the same number. At t* = 399 of Stable Diffusion unit and vp differ by 24 %.
    """
    if contract.noise == "unit":
        return 1.0
    sigma = schedule.sigma(contract.timestep)
    if contract.noise == "edm" and schedule.kind == "vp":
        return float(sigma / torch.sqrt(1 + sigma.square()))
    return float(schedule.scales(contract.timestep)[1])


def one_step(student: Denoiser, z: torch.Tensor, cond: Condition, contract: StudentContract) -> torch.Tensor:
    """x0 = g(z, c), exactly one network call: the teacher's x0 prediction at t* with z as the noisy image.

    Args:
        student: the generator with its base's prediction type; the contract's wins where it names one.
        z: (B, C, H, W) standard normal.
        cond: one row for each picture; there is no negative prompt, since guidance is distilled in.
        contract: t* and noise convention.

    Returns:
        (B, C, H, W) float32 latents in the scale of the diffusion model.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    if contract.trained_guidance and getattr(getattr(student.backbone, "config", None), "time_cond_proj_dim", None):
        scale = torch.full(
            (len(z),), contract.trained_guidance, device=z.device
        )  # a consistency model reads its guidance
        cond = replace(cond, extra={"guidance": scale} | cond.extra)
    if contract.prediction not in ("model", student.prediction):
        student = replace(student, prediction=contract.prediction)
    u = z.to(wide) * noise_scale(student.schedule, contract)
    # Xie et al. 2024, initialisation from the teacher: g(z) is its x0 prediction at a fixed time
    return student.predict(u, contract.timestep, cond).x0.to(wide)


@dataclass(frozen=True)
class CorrectConfig(Config):
    """Repair of one-step samples.

    Attributes:
        steps: Langevin steps; 0 leaves the sample as it is. The paper shows 300.
        timestep: noise level of the chain; higher moves more.
        ge, gz: step sizes of eps and z; gz 0 freezes z and needs no autograd.
        guidance: of the teacher; 0 takes that of the student's training, which its preset names.
        clip: largest RMS of the z drift of a sample.
    """

    steps: int = 16
    timestep: float = 399.0
    ge: float = 0.16
    gz: float = 0.0
    guidance: float = 0.0
    clip: float = 10.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise refuse("steps", self.steps, "0 or more", "0 leaves the sample as it is")
        if self.guidance < 0:
            raise refuse("guidance", self.guidance, "0 or more", "0 takes that of the student's training")
        self.chain(1)

    def chain(self, steps: int | None = None) -> EStepConfig:
        """The same settings as an E-step."""
        return EStepConfig(steps or self.steps, self.ge, self.gz, "cancel", self.clip)


class Networks(NamedTuple):
    """The three roles: one-step generator, teacher, and the student's own score network."""

    generator: Denoiser
    teacher: Denoiser
    score: Denoiser


class RepairWarning(UserWarning):
    """A repair aims elsewhere than the student's training did."""


def repair_guidance(config: CorrectConfig, contract: StudentContract, with_null: bool) -> float:
    """The teacher's guidance in a repair: as asked for, else as the student was trained.

    Warns where the two differ: the chain then leads away from what the student was distilled towards. Without the empty
    prompt (``with_null`` False) nothing can be guided.
    """
    trained = contract.trained_guidance
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
    networks: Networks, z: torch.Tensor, cond: Condition, contract: StudentContract, config: CorrectConfig,
    seeds: list[int], null: Condition | None = None, progress: Progress = silent,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run the joint chain from a sample towards the teacher's, then remove the noise (Xie et al. 2024, Fig. 1).

    Args:
        networks: with another score network than the student's own the chain would have another target.
        z: (B, C, H, W) the sample's latent, as it went into :func:`one_step`.
        seeds: one for each sample's chain noise.
        null: the empty prompt, needed when guidance is not 1; see :func:`repair_guidance`.

    Returns:
        (x0, z^K): x0 = g(z^K) + (sigma / alpha) r, float32. With 0 steps, ``one_step`` bit for bit.

    Raises:
        VitrineError: Guidance is not 1, and there is no ``null``.
    """
    generator, teacher, score = networks
    if config.steps == 0:
        with torch.no_grad():
            return one_step(generator, z, cond, contract), z
    z, draw = z.float(), RowNoise(seeds).like
    t = torch.full((len(z),), config.timestep, dtype=torch.float64)

    def net(u: torch.Tensor) -> torch.Tensor:
        return one_step(generator, u, cond, contract)

    guidance = repair_guidance(config, contract, null is not None)
    gap = score_gap(teacher, score, t, cond, null, guidance)
    alpha, sigma = levels = NoiseLevels.at(teacher.schedule, t, z)
    rho = Joint(net, gap, levels)
    end = e_step(rho, z, draw(z), config.chain(), draw, lambda done, x0: progress(done, config.steps, x0))
    with torch.no_grad():
        # Xie et al. 2024, noise cancelled: x = alpha g(z^K) + sigma r, divided by alpha
        return net(end.z) + (sigma / alpha) * end.r, end.z
