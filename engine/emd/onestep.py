"""One-step generation, and the repair of its samples by the chain they were trained with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..condition import Condition
from ..config import Config
from ..denoiser import Denoiser
from ..errors import refuse
from ..noise import RowNoise
from ..progress import Progress, silent
from ..schedule import NoiseSchedule
from .chain import e_step
from .config import EStepConfig
from .contract import StudentContract
from .losses import levels, score_gap


def noise_scale(schedule: NoiseSchedule, contract: StudentContract) -> float:
    """What z is multiplied by before the network sees it.

    ``unit`` 1; ``vp`` sigma_vp(t*); ``edm`` sigma / sqrt(1 + sigma^2) after the input scaling of a VP network, which
    is the same number by another road. At t* = 399 of Stable Diffusion unit and vp differ by 24 %.
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
        student: the generator with its base's convention; the contract's own prediction wins where it names one.
        z: (B, C, H, W) standard normal.
        cond: one row a picture; there is no negative prompt, since guidance is distilled in.
        contract: t* and noise convention.

    Returns:
        (B, C, H, W) float32 latents in the scale of the diffusion model.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
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
        guidance: of the teacher.
        clip: largest RMS of the z drift in a row.
    """

    steps: int = 16
    timestep: float = 399.0
    ge: float = 0.16
    gz: float = 0.0
    guidance: float = 1.0
    clip: float = 10.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise refuse("steps", self.steps, "0 or more", "0 leaves the sample as it is")
        self.chain(1)

    def chain(self, steps: int | None = None) -> EStepConfig:
        """The E-step these settings stand for."""
        return EStepConfig(steps or self.steps, self.ge, self.gz, "cancel", self.clip)


def correct(
    generator: Denoiser, teacher: Denoiser, score: Denoiser, z: torch.Tensor, cond: Condition,
    contract: StudentContract, config: CorrectConfig, seeds: list[int], null: Condition | None = None,
    progress: Progress = silent,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Walk the joint chain from a sample towards the teacher's, then remove the noise (Xie et al. 2024, Fig. 1).

    Args:
        generator, teacher, score: the three roles; ``score`` is the student's own score network, without which the
            chain would have another target.
        z: (B, C, H, W) the sample's latent, as :func:`one_step` was given it.
        seeds: one for each row's chain noise.

    Returns:
        (x0, z^K): x0 = g(z^K) + (sigma / alpha) r, float32. With 0 steps, ``one_step`` bit for bit.
    """
    if config.steps == 0:
        with torch.no_grad():
            return one_step(generator, z, cond, contract), z
    z, draw = z.float(), RowNoise(seeds).like
    t = torch.full((len(z),), config.timestep, dtype=torch.float64)
    alpha, sigma = levels(teacher.schedule, t, z)

    def net(u: torch.Tensor) -> torch.Tensor:
        return one_step(generator, u, cond, contract)

    gap = score_gap(teacher, score, t, cond, null, config.guidance)
    end = e_step(net, gap, z, draw(z), alpha, sigma, config.chain(), draw, lambda i: progress(i, config.steps, None))
    with torch.no_grad():
        return net(end.z) + (sigma / alpha) * end.r, end.z
