"""A student in two dimensions that is too small for its teacher: it must cover two modes badly or drop one.

Teacher 0.2 N((-2.5, 0), 0.25 I) + 0.8 N((2.5, 0), 0.25 I); student g(z) = a z + b; all scores are exact, alpha is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ...engine.emd.chain import (
    ChainEnd,
    DifferenceOf,
    EStepConfig,
    Joint,
    NoiseLevels,
    NoiseLike,
    ScoreDifference,
    e_step,
    normal_from,
)

Walk = Callable[[Joint, torch.Tensor, torch.Tensor, EStepConfig, NoiseLike], ChainEnd]
"""An E-step: density, z, eps, settings and noise to the chain's end."""


class Schooling(NamedTuple):
    """How a student of the mixture is trained.

    Attributes:
        steps, batch: updates, and samples of each.
        levels: noise levels sigma; each sample has one of them, all equally likely.
        walk: the E-step; :func:`~vitrine.engine.emd.e_step` samples (eps, z).
    """

    steps: int = 600
    batch: int = 256
    levels: tuple[float, ...] = (0.5,)
    walk: Walk = e_step


DEFAULT_SCHOOLING = Schooling()


@dataclass(frozen=True)
class MixtureResult:
    """Mass near the minor mode, forward KL at sigma 0.5, and the trained student."""

    minor_mass: float
    forward_kl: float
    a: torch.Tensor
    b: torch.Tensor


def mixture_distance(a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> tuple[float, float]:
    """(minor mass, forward KL) of the student N(b, a a^T + sigma^2 I) at sigma 0.5, from 20,000 samples each."""
    gen = torch.Generator().manual_seed(seed)
    x = _teacher_samples(20_000, gen)
    clean = torch.randn(20_000, 2, generator=gen, dtype=torch.float64) @ a.T + b
    mass = (torch.linalg.vector_norm(clean - _MODES[0], dim=1) < 1.5).double().mean()
    student = torch.distributions.MultivariateNormal(b, a @ a.T + _SIGMA**2 * torch.eye(2, dtype=torch.float64))
    log_teacher = torch.logsumexp(_log_joint(x, torch.tensor(_SIGMA, dtype=torch.float64)), 1)
    return float(mass), float((log_teacher - student.log_prob(x)).mean())


def best_student() -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) of the smallest forward KL: the teacher's own mean and covariance.

    Noise adds the same to both covariances, so that it is best at every noise level, and at any mixture of them.
    """
    fraction = _LOG_SHARE.exp()
    mean = fraction @ _MODES
    spread = (_MODES - mean).T @ torch.diag(fraction) @ (_MODES - mean) + _SPREAD**2 * torch.eye(2, dtype=torch.float64)
    return torch.linalg.cholesky(spread), mean


def train_mixture(config: EStepConfig, seed: int = 0, schooling: Schooling = DEFAULT_SCHOOLING) -> MixtureResult:
    """A student that starts at a = 2 I, b = 0, and covers both modes; exact scores, Adam, rate falling to zero."""
    gen = torch.Generator().manual_seed(seed)
    a = (2 * torch.eye(2, dtype=torch.float64)).requires_grad_(True)
    b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a, b], lr=1e-2, betas=(0.0, 0.99))
    for step in range(schooling.steps):
        end, sigma = mixture_chain((a, b), config, gen, schooling)
        y = end.z @ a.T + b
        loss = (0.5 * (y - (y + sigma * end.r).detach()).square()).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 1e-2 * (1 - step / schooling.steps)
        adam.step()
    return MixtureResult(*mixture_distance(a.detach(), b.detach()), a.detach(), b.detach())


def mixture_chain(
    student: tuple[torch.Tensor, torch.Tensor], config: EStepConfig, gen: torch.Generator, schooling: Schooling
) -> tuple[ChainEnd, torch.Tensor]:
    """(the ends of a batch of chains from this student (a, b), the noise level of each sample)."""
    a, b = (part.detach() for part in student)
    z, eps = (torch.randn(schooling.batch, 2, generator=gen, dtype=torch.float64) for _ in range(2))
    sigma = torch.tensor(schooling.levels, dtype=torch.float64)
    if len(sigma) > 1:
        sigma = sigma[torch.randint(len(sigma), (schooling.batch,), generator=gen)][:, None]
    levels = NoiseLevels(torch.ones((), dtype=torch.float64), sigma)
    rho = Joint(partial(_affine, a, b), _mixture_difference(a, b, sigma), levels)
    return schooling.walk(rho, z, eps, config, normal_from(gen)), sigma


_SIGMA, _SPREAD = 0.5, 0.5
_MODES = torch.tensor([[-2.5, 0.0], [2.5, 0.0]], dtype=torch.float64)
_LOG_SHARE = torch.tensor([0.2, 0.8], dtype=torch.float64).log()


def _affine(a: torch.Tensor, b: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return z @ a.T + b


def _teacher_samples(count: int, gen: torch.Generator) -> torch.Tensor:
    side = (torch.rand(count, generator=gen, dtype=torch.float64) < 0.8).long()
    width = math.hypot(_SPREAD, _SIGMA)
    return _MODES[side] + width * torch.randn(count, 2, generator=gen, dtype=torch.float64)


def _log_joint(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    var = _SPREAD**2 + sigma.square()
    return _LOG_SHARE - (x[:, None] - _MODES).square().sum(-1) / (2 * var) - (2 * math.pi * var).log()


def _mixture_difference(a: torch.Tensor, b: torch.Tensor, sigma: torch.Tensor) -> DifferenceOf:
    """Delta at sigma, one number or (B, 1)."""
    each = sigma.reshape(-1, 1, 1)
    precision = torch.linalg.inv(a @ a.T + each.square() * torch.eye(2, dtype=torch.float64))

    def difference(x: torch.Tensor) -> ScoreDifference:
        fraction = torch.softmax(_log_joint(x, sigma), 1)
        s_q = (fraction @ _MODES - x) / (_SPREAD**2 + sigma.square())
        return ScoreDifference(sigma * (s_q + ((x - b)[:, None] @ precision)[:, 0]))

    return difference
