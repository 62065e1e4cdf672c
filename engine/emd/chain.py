"""The E-step: short Langevin chains that move the student's samples towards the teacher's.

Xie et al. 2024 (EM Distillation). Shapes: z, eps, x and Delta are (B, ...); alpha and sigma broadcast against them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..schedule import append_dims
from .config import EStepConfig


class Gap(NamedTuple):
    """What the two score networks say of x: Delta = sigma (s_q - s_phi), and the teacher's x0 where it has one."""

    delta: torch.Tensor
    x0: torch.Tensor | None = None


class ChainEnd(NamedTuple):
    """Where a chain ended: eps^K, z^K, the accumulated noise a^K, the M-step direction r, the last teacher x0."""

    eps: torch.Tensor
    z: torch.Tensor
    noise: torch.Tensor
    r: torch.Tensor
    x0: torch.Tensor | None = None

    def estimate(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        """r by another estimator, from the same chain; ``delta`` is the gap at the final point."""
        return {"cancel": self.eps - self.noise, "raw": self.eps, "last": delta}[name]


Net = Callable[[torch.Tensor], torch.Tensor]
GapOf = Callable[[torch.Tensor], Gap]
Draw = Callable[[torch.Tensor], torch.Tensor]


def normal_from(generator: torch.Generator) -> Draw:
    """Normal noise from one generator; what training uses."""
    return lambda like: torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def e_step(
    net: Net, gap: GapOf, z: torch.Tensor, eps: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor,
    config: EStepConfig, draw: Draw, after_step: Callable[[int], None] = lambda done: None,
) -> ChainEnd:  # fmt: skip
    """K Langevin steps on (eps, z) for rho(x, z) = q(x) p(z | x), x = alpha g(z) + sigma eps.

    Args:
        net: the generator g, z -> x0.
        gap: Delta at x; called without autograd. One t for each row, constant along its chain.
        z, eps: (B, ...) float32 or float64 starts, usually standard normal.
        alpha, sigma: signal and noise scale of each row.
        draw: standard normal noise of a tensor's shape.
        after_step: told the number of steps done; may raise to stop.

    Returns:
        ChainEnd: everything detached; no weight has received a gradient.
    """
    net = _held(net, z) if config.gz == 0 else net
    noise, x0 = eps, None
    for i in range(config.steps):
        delta, drift, x0 = _drift(net, gap, z, eps, alpha, sigma, config)
        n = draw(eps)
        # Xie et al. 2024, Langevin on (eps, z): grad_eps = Delta - eps
        eps = (1 - config.ge) * eps + config.ge * delta + (2 * config.ge) ** 0.5 * n
        noise = (1 - config.ge) * noise + (2 * config.ge) ** 0.5 * n  # the same n, the same decay: what r leaves out
        if drift is not None:
            # Xie et al. 2024: grad_z = (alpha / sigma) J^T Delta - z
            z = (1 - config.gz) * z + config.gz * drift + (2 * config.gz) ** 0.5 * draw(z)
        after_step(i + 1)
    return _end(net, gap, z, eps, noise, x0, alpha, sigma, config)


def _held(net: Net, z: torch.Tensor) -> Net:
    """g of a z that does not move: one call serves the whole chain."""
    with torch.no_grad():
        y = net(z)
    return lambda u: y


def _end(
    net: Net, gap: GapOf, z: torch.Tensor, eps: torch.Tensor, noise: torch.Tensor, x0: torch.Tensor | None,
    alpha: torch.Tensor, sigma: torch.Tensor, config: EStepConfig,
) -> ChainEnd:  # fmt: skip
    if config.estimator == "raw":
        return ChainEnd(eps, z, noise, eps, x0)
    if config.estimator == "cancel":
        return ChainEnd(eps, z, noise, eps - noise, x0)
    with torch.no_grad():  # Stein: E_rho[(Delta - eps) f(z)] = 0, so Delta may stand for eps
        found = gap(alpha * net(z).to(z.dtype) + sigma * eps)
    return ChainEnd(eps, z, noise, found.delta, found.x0)


def _drift(
    net: Net, gap: GapOf, z: torch.Tensor, eps: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor,
    config: EStepConfig,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Delta, the clipped (alpha / sigma) J^T Delta (None when z is frozen), the teacher's x0."""
    if config.gz == 0:
        with torch.no_grad():
            found = gap(alpha * net(z).to(z.dtype) + sigma * eps)
        return found.delta, None, found.x0
    leaf = z.detach().requires_grad_(True)
    with torch.enable_grad():
        y = net(leaf).to(z.dtype)
    with torch.no_grad():
        found = gap((alpha * y + sigma * eps).detach())
    (pulled,) = torch.autograd.grad(y, leaf, (alpha / sigma) * found.delta)  # one product with J^T; none through scores
    return found.delta, clipped(pulled, config.clip), found.x0


def clipped(drift: torch.Tensor, limit: float) -> torch.Tensor:
    """Rows whose RMS is above ``limit`` are shortened to it; the others stay as they are."""
    size = row_rms(drift)
    factor = torch.where(size > limit, limit / size.clamp(min=1e-30), torch.ones_like(size))
    return drift * append_dims(factor, drift.ndim)


def row_rms(x: torch.Tensor) -> torch.Tensor:
    """(B,) root mean square of each row."""
    return x.flatten(1).square().mean(1).sqrt()


def xz_chain(
    net: Net, score_gap: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, z: torch.Tensor,
    alpha: torch.Tensor, sigma: torch.Tensor, steps: int, gx: float, gz: float, draw: Draw,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same target walked in (x, z). Stiff in x (curvature 1 / sigma^2): kept for comparison.

    Args:
        score_gap: s_q - s_phi at x (not times sigma).

    Returns:
        x and z after ``steps`` steps of sizes gx and gz.
    """
    for _ in range(steps):
        leaf = z.detach().requires_grad_(True)
        with torch.enable_grad():
            y = net(leaf).to(z.dtype)
        with torch.no_grad():
            rest = x - alpha * y.detach()
            # Xie et al. 2024: grad_x log rho = s_q - s_phi - (x - alpha g) / sigma^2
            grad_x = score_gap(x) - rest / sigma**2
        (pulled,) = torch.autograd.grad(y, leaf, (alpha / sigma**2) * rest)
        x = x + gx * grad_x + (2 * gx) ** 0.5 * draw(x)
        z = z + gz * (pulled - z) + (2 * gz) ** 0.5 * draw(z)
    return x, z
