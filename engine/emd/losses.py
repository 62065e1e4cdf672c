"""The M-step, the student score's loss, and the score difference of two denoisers."""

from __future__ import annotations

import torch

from ..diffusion.denoiser import Denoiser, Prediction
from ..diffusion.guidance import guide
from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..network.condition import Condition
from .chain import ChainEnd, DifferenceOf, Joint, NoiseLevels, ScoreDifference, row_rms

WEIGHTS = ("uniform", "dmd")


def sample_times(
    schedule: NoiseSchedule, count: int, generator: torch.Generator, low: float = 0.02, high: float = 0.98
) -> torch.Tensor:
    """(count,) timesteps, uniform over a part of the schedule, in fractions of its length; integers."""
    if not 0 <= low < high <= 1:
        raise refuse("part of the schedule", (low, high), "0 <= low < high <= 1", "0.02 and 0.98 are usual")
    last = schedule.steps - 1
    fraction = torch.rand(count, generator=generator, dtype=torch.float64)
    return ((low + (high - low) * fraction) * last).round()


def score_difference(
    teacher: Denoiser,
    student: Denoiser,
    t: torch.Tensor,
    cond: Condition,
    null: Condition | None = None,
    guidance: float = 1.0,
) -> DifferenceOf:
    """Delta(x) at timesteps t (B,). Only the teacher is guided, never the student score."""
    if guidance != 1 and null is None:
        raise refuse("guidance", guidance, "1 without an empty prompt", "encode the empty prompt, or use guidance 1")

    def difference(x: torch.Tensor) -> ScoreDifference:
        alpha, sigma = NoiseLevels.at(teacher.schedule, t, x)
        if guidance == 1 or null is None:
            eps_q = teacher.predict(x, t, cond).eps
        else:
            empty_rows = null.take(
                torch.arange(len(x)) if null.text is None or len(null.text) > 1 else torch.zeros(len(x)).long()
            )
            if not cond.alike(empty_rows):  # a shorter text would need padding and a mask, which not every network has
                empty, full = teacher.predict(x, t, empty_rows), teacher.predict(x, t, cond)
            else:
                both = teacher.predict(torch.cat([x, x]), torch.cat([t, t]), Condition.batch([cond, empty_rows]))
                full, empty = (Prediction(*half) for half in zip(*(part.chunk(2) for part in both), strict=True))
            eps_q = guide(empty.eps, full.eps, guidance)
        # sigma (s_q - s_phi) with s = -eps / sigma: student minus teacher, whatever the networks predict
        delta = student.predict(x, t, cond).eps - eps_q
        return ScoreDifference(delta.to(x.dtype), (x - sigma * eps_q.to(x.dtype)) / alpha)

    return difference


def m_step_loss(y: torch.Tensor, end: ChainEnd, levels: NoiseLevels, weight: str = "uniform") -> torch.Tensor:
    """Regresses y = g(z^K) on itself shifted by (sigma / alpha) r; sum over pixels, mean over the batch.

    ``uniform`` is w = sigma^2 / alpha^2 on -log p(x | z); ``dmd`` also divides each row by mean |y - teacher x0|.
    """
    if weight not in WEIGHTS or (weight == "dmd" and end.x0 is None):
        raise refuse("weight", weight, WEIGHTS, "use uniform if the teacher gives no x0")
    (alpha, sigma), y = levels, y.to(end.r.dtype)
    # Xie et al. 2024, M-step: (w alpha^2 / sigma^2) 1/2 |g(z) - sg[g(z) + (sigma / alpha) r]|^2
    target = (y + (sigma / alpha) * end.r).detach()
    rows = 0.5 * (y - target).square().flatten(1).sum(1)
    if weight == "dmd" and end.x0 is not None:
        # Yin et al. 2024 (DMD), Eq. 8: the normaliser that keeps all noise levels at one scale
        rows = rows / (y.detach() - end.x0).abs().flatten(1).mean(1).clamp(min=1e-4)
    return rows.mean()


def score_loss(score: Denoiser, y: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Denoising score matching on the student's own, uncorrected samples y = g(z), detached (Vincent 2011).

    The squared error in the network's prediction convention, as in the teacher's training.
    """
    y, levels = y.detach().to(noise.dtype), NoiseLevels.at(score.schedule, t, noise)
    noisy = levels.noisy(y, noise)
    return score.error(score.forward(noisy, t, cond), noisy, y, noise, t).square().mean()


def z_drifts(rho: Joint, z: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """(B,) RMS of (alpha / sigma) J^T Delta at a start point."""
    return row_rms(rho.z_drift(z, eps)[1])
