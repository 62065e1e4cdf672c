"""The E-step: short Langevin chains that move the student's samples towards the teacher's.

Xie et al. 2024 (EM Distillation). Shapes: z, eps, x and Delta are (B, ...); alpha and sigma broadcast against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch

from ..diffusion.schedule import NoiseSchedule, append_dims
from ..settings.option import Option, Options

Net = Callable[[torch.Tensor], torch.Tensor]
"""The generator g, z -> x0."""
NoiseLike = Callable[[torch.Tensor], torch.Tensor]
"""Samples standard normal noise of a tensor's shape."""
ESTIMATORS = ("cancel", "last")


@dataclass(frozen=True)
class EStepConfig(Options):
    """One E-step. The update is u <- u + gamma grad + sqrt(2 gamma) n."""

    steps: Annotated[
        int,
        Option(
            "Langevin steps; 4 to start with, 8 for release.",
            ge=1,
            top=64,
            details="K; without one the M-step has no signal.",
            remedy="K = 1 with ge = 1, gz = 0 is Diff-Instruct",
        ),
    ] = 4
    ge: Annotated[float, Option("Step size of eps.", gt=0, le=1, remedy="start from 0.16")] = 0.16
    gz: Annotated[
        float,
        Option(
            "Step size of z. Moving z covers modes; 0 freezes it and needs no autograd.",
            ge=0,
            le=1,
        ),
    ] = 0.01
    estimator: Annotated[
        str,
        Option(
            "Of the M-step direction. cancel removes the accumulated noise, as in the paper; last takes the score "
            "difference at the final point, one more pair of score calls.",
            choices=ESTIMATORS,
        ),
    ] = "cancel"
    clip: Annotated[
        float,
        Option(
            "Largest RMS of a batch row's z drift (alpha / sigma) J^T Delta; infinity clips nothing.",
            gt=0,
            remedy="leave it at infinity for none",
        ),
    ] = math.inf

    @classmethod
    def diff_instruct(cls) -> EStepConfig:
        """Diff-Instruct, or DMD without regression: one full step of eps, z frozen."""
        return cls(steps=1, ge=1.0, gz=0.0)

    def with_gz(self, gz: float, clip: float = math.inf) -> EStepConfig:
        """The settings with another step size and drift limit of z."""
        return replace(self, gz=gz, clip=clip)


class NoiseLevels(NamedTuple):
    """Signal and noise scale of each batch row: x = alpha x0 + sigma eps."""

    alpha: torch.Tensor
    sigma: torch.Tensor

    @classmethod
    def at(cls, schedule: NoiseSchedule, t: torch.Tensor, like: torch.Tensor) -> NoiseLevels:
        """The levels of (B,) timesteps, shaped to broadcast against ``like`` and of its dtype and device."""
        return cls(*(append_dims(scale.to(like.device, like.dtype), like.ndim) for scale in schedule.scales(t)))

    def noisy(self, x0: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        """x = alpha x0 + sigma eps."""
        return self.alpha * x0 + self.sigma * eps

    def take(self, rows: torch.Tensor) -> NoiseLevels:
        """The levels of the given batch rows."""
        return NoiseLevels(self.alpha[rows], self.sigma[rows])


class ScoreDifference(NamedTuple):
    """The score difference at x: Delta = sigma (s_q - s_phi), and the teacher's x0 if known."""

    delta: torch.Tensor
    x0: torch.Tensor | None = None


DifferenceOf = Callable[[torch.Tensor], ScoreDifference]


class Joint(NamedTuple):
    """The target density of the chain: rho(x, z) = q(x) p(z | x) with x = alpha g(z) + sigma eps.

    Attributes:
        net: the generator g.
        difference: x -> Delta; called without autograd.
        levels: noise level of each batch row, constant along its chain.
    """

    net: Net
    difference: DifferenceOf
    levels: NoiseLevels

    @torch.no_grad()
    def difference_at(self, z: torch.Tensor, eps: torch.Tensor) -> ScoreDifference:
        """The score difference at x(z, eps)."""
        return self.difference(self.levels.noisy(self.net(z).to(z.dtype), eps))

    def z_drift(self, z: torch.Tensor, eps: torch.Tensor) -> tuple[ScoreDifference, torch.Tensor]:
        """The score difference at x(z, eps), and (alpha / sigma) J^T Delta: one vector-Jacobian product."""
        alpha, sigma = self.levels
        leaf = z.detach().requires_grad_(True)
        with torch.enable_grad():
            y = self.net(leaf).to(z.dtype)
        with torch.no_grad():
            difference = self.difference(self.levels.noisy(y.detach(), eps))
        (drift,) = torch.autograd.grad(y, leaf, (alpha / sigma) * difference.delta)
        return difference, drift

    @torch.no_grad()
    def with_z_frozen(self, z: torch.Tensor) -> Joint:
        """The density for a fixed z: one generator call for the whole chain."""
        y = self.net(z)
        return self._replace(net=lambda u: y)


class ChainEnd(NamedTuple):
    """The end of a chain: eps^K, z^K, the accumulated noise a^K, the M-step direction r, the last teacher x0.

    ``moved`` is the (B,) RMS distance that drifts moved z, without noise; None if z is frozen.
    """

    eps: torch.Tensor
    z: torch.Tensor
    noise: torch.Tensor
    r: torch.Tensor
    x0: torch.Tensor | None = None
    moved: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> ChainEnd:
        """The ends of the given batch rows."""
        return ChainEnd(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def normal_from(generator: torch.Generator) -> NoiseLike:
    """Samples normal noise from one generator for the whole batch."""
    return lambda like: torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def e_step(rho: Joint, z: torch.Tensor, eps: torch.Tensor, config: EStepConfig, noise_like: NoiseLike) -> ChainEnd:
    """K Langevin steps on (eps, z) for rho(x, z) = q(x) p(z | x), x = alpha g(z) + sigma eps.

    Args:
        rho: generator, score difference and noise levels.
        z, eps: (B, ...) float32 or float64 starts, usually standard normal.
        noise_like: samples the chain's noise.

    Returns:
        The end of the chain, detached; weights receive no gradient.
    """
    if config.gz == 0:
        rho = rho.with_z_frozen(z)
    noise, x0, still = eps, None, z
    for _ in range(config.steps):
        (delta, x0), drift = _drifts(rho, z, eps, config)
        n = noise_like(eps)
        # Xie et al. 2024, Langevin on (eps, z): grad_eps = Delta - eps
        eps = (1 - config.ge) * eps + config.ge * delta + (2 * config.ge) ** 0.5 * n
        noise = (1 - config.ge) * noise + (2 * config.ge) ** 0.5 * n  # the accumulated noise, which r excludes
        if drift is not None:
            # Xie et al. 2024: grad_z = (alpha / sigma) J^T Delta - z
            m = (2 * config.gz) ** 0.5 * noise_like(z)
            z = (1 - config.gz) * z + config.gz * drift + m
            still = (1 - config.gz) * still + m  # z without drifts
    moved = None if config.gz == 0 else row_rms(z - still)
    if config.estimator == "last":  # Stein: E_rho[(Delta - eps) f(z)] = 0, so Delta may replace eps
        delta, x0 = rho.difference_at(z, eps)
        return ChainEnd(eps, z, noise, delta, x0, moved)
    return ChainEnd(eps, z, noise, eps - noise, x0, moved)


def _drifts(
    rho: Joint, z: torch.Tensor, eps: torch.Tensor, config: EStepConfig
) -> tuple[ScoreDifference, torch.Tensor | None]:
    """The score difference, and the clipped drift of z, None if z is frozen."""
    if config.gz == 0:
        return rho.difference_at(z, eps), None
    difference, drift = rho.z_drift(z, eps)
    return difference, clipped(drift, config.clip)


def clipped(drift: torch.Tensor, limit: float) -> torch.Tensor:
    """Rescales batch rows with an RMS above ``limit`` to that RMS."""
    size = row_rms(drift)
    factor = torch.where(size > limit, limit / size.clamp(min=1e-30), torch.ones_like(size))
    return drift * append_dims(factor, drift.ndim)


def row_rms(x: torch.Tensor) -> torch.Tensor:
    """(B,) root mean square of each batch row."""
    return x.flatten(1).square().mean(1).sqrt()
