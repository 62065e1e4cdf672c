"""The E-step: short Langevin chains that move the student's samples towards the teacher's.

Xie et al. 2024 (EM Distillation). Shapes: z, eps, x and Delta are (B, ...); alpha and sigma broadcast against them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..diffusion.schedule import NoiseSchedule, append_dims
from .chain_config import EStepConfig

Net = Callable[[torch.Tensor], torch.Tensor]
"""The generator g, z -> x0."""
Draw = Callable[[torch.Tensor], torch.Tensor]
"""Standard normal noise of a tensor's shape."""


class NoiseLevels(NamedTuple):
    """Signal and noise scale of each row: x = alpha x0 + sigma eps."""

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
        """The levels of some rows."""
        return NoiseLevels(self.alpha[rows], self.sigma[rows])


class Gap(NamedTuple):
    """What the two score networks say of x: Delta = sigma (s_q - s_phi), and the teacher's x0 where it has one."""

    delta: torch.Tensor
    x0: torch.Tensor | None = None


GapOf = Callable[[torch.Tensor], Gap]


class Joint(NamedTuple):
    """The density the chain walks: rho(x, z) = q(x) p(z | x) with x = alpha g(z) + sigma eps.

    Attributes:
        net: the generator g.
        gap: Delta at x; called without autograd.
        levels: one noise level for each row, constant along its chain.
    """

    net: Net
    gap: GapOf
    levels: NoiseLevels

    @torch.no_grad()
    def gap_at(self, z: torch.Tensor, eps: torch.Tensor) -> Gap:
        """The gap at x(z, eps)."""
        return self.gap(self.levels.noisy(self.net(z).to(z.dtype), eps))

    def z_drift(self, z: torch.Tensor, eps: torch.Tensor) -> tuple[Gap, torch.Tensor]:
        """The gap at x(z, eps) and (alpha / sigma) J^T Delta: one product with J^T, none through the scores."""
        alpha, sigma = self.levels
        leaf = z.detach().requires_grad_(True)
        with torch.enable_grad():
            y = self.net(leaf).to(z.dtype)
        with torch.no_grad():
            gap = self.gap(self.levels.noisy(y.detach(), eps))
        (drift,) = torch.autograd.grad(y, leaf, (alpha / sigma) * gap.delta)
        return gap, drift

    @torch.no_grad()
    def with_z_frozen(self, z: torch.Tensor) -> Joint:
        """The same where z does not move: one generator call serves the whole chain."""
        y = self.net(z)
        return self._replace(net=lambda u: y)


class ChainEnd(NamedTuple):
    """Where a chain ended: eps^K, z^K, the accumulated noise a^K, the M-step direction r, the last teacher x0.

    ``gap`` and ``drift`` are (B,) RMS of Delta and of z's drift at the chain's last step. ``moved`` is the RMS of all
    drifts of z, without noise. The latter two are None where z is frozen.
    """

    eps: torch.Tensor
    z: torch.Tensor
    noise: torch.Tensor
    r: torch.Tensor
    x0: torch.Tensor | None = None
    gap: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    moved: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> ChainEnd:
        """The ends of some of the batch's chains."""
        return ChainEnd(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def normal_from(generator: torch.Generator) -> Draw:
    """Normal noise from one generator, for all rows together."""
    return lambda like: torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def e_step(
    rho: Joint, z: torch.Tensor, eps: torch.Tensor, config: EStepConfig, draw: Draw,
    after_step: Callable[[int, torch.Tensor | None], None] = lambda done, x0: None,
) -> ChainEnd:  # fmt: skip
    """K Langevin steps on (eps, z) for rho(x, z) = q(x) p(z | x), x = alpha g(z) + sigma eps.

    Args:
        rho: generator, score difference and noise levels.
        z, eps: (B, ...) float32 or float64 starts, usually standard normal.
        draw: where the chain's noise comes from.
        after_step: called with the number of steps done and the teacher's clean picture there, if ``rho`` knows it; may
            raise to stop.

    Returns:
        Everything detached; no weight has received a gradient.
    """
    if config.gz == 0:
        rho = rho.with_z_frozen(z)
    noise, x0, still = eps, None, z
    for i in range(config.steps):
        (delta, x0), drift = _drifts(rho, z, eps, config)
        n = draw(eps)
        # Xie et al. 2024, Langevin on (eps, z): grad_eps = Delta - eps
        eps = (1 - config.ge) * eps + config.ge * delta + (2 * config.ge) ** 0.5 * n
        noise = (1 - config.ge) * noise + (2 * config.ge) ** 0.5 * n  # the same n, the same decay: what r leaves out
        if drift is not None:
            # Xie et al. 2024: grad_z = (alpha / sigma) J^T Delta - z
            m = (2 * config.gz) ** 0.5 * draw(z)
            z = (1 - config.gz) * z + config.gz * drift + m
            still = (1 - config.gz) * still + m  # where z would be without drifts
        after_step(i + 1, x0)
    sizes = (row_rms(delta), *((None, None) if drift is None else (row_rms(drift), row_rms(z - still))))
    if config.estimator == "last":  # Stein: E_rho[(Delta - eps) f(z)] = 0, so Delta may stand for eps
        delta, x0 = rho.gap_at(z, eps)
        return ChainEnd(eps, z, noise, delta, x0, *sizes)
    return ChainEnd(eps, z, noise, eps if config.estimator == "raw" else eps - noise, x0, *sizes)


def _drifts(rho: Joint, z: torch.Tensor, eps: torch.Tensor, config: EStepConfig) -> tuple[Gap, torch.Tensor | None]:
    """The gap, and the clipped drift of z; None while z is frozen."""
    if config.gz == 0:
        return rho.gap_at(z, eps), None
    gap, drift = rho.z_drift(z, eps)
    return gap, clipped(drift, config.clip)


def clipped(drift: torch.Tensor, limit: float) -> torch.Tensor:
    """Rows whose RMS is above ``limit`` are shortened to it; the others stay as they are."""
    size = row_rms(drift)
    factor = torch.where(size > limit, limit / size.clamp(min=1e-30), torch.ones_like(size))
    return drift * append_dims(factor, drift.ndim)


def row_rms(x: torch.Tensor) -> torch.Tensor:
    """(B,) root mean square of each row."""
    return x.flatten(1).square().mean(1).sqrt()
