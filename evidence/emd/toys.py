"""Two students in two dimensions where everything is known: the linear-Gaussian chain and the capacity-limited one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from ...engine.emd.chain import Gap, GapOf, Joint, NoiseLevels, e_step, normal_from
from ...engine.emd.config import EStepConfig


@dataclass(frozen=True)
class LinearGaussian:
    """Teacher q = N(mean, cov) at one noise level; generator g(z) = a z + b. All float64."""

    mean: torch.Tensor
    cov: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    alpha: torch.Tensor
    sigma: torch.Tensor

    @classmethod
    def example(cls) -> LinearGaussian:
        """One fixed case, teacher and student well apart."""
        tensor = partial(torch.tensor, dtype=torch.float64)
        return cls(
            tensor([0.5, -0.3]), tensor([[1.3, 0.4], [0.4, 0.9]]), tensor([[0.9, -0.3], [0.2, 0.7]]),
            tensor([0.2, 0.1]), tensor(0.8), tensor(0.6),
        )  # fmt: skip

    def rho(self) -> Joint:
        """What the chain walks."""
        return Joint(self.net, self.gap, NoiseLevels(self.alpha, self.sigma))

    def net(self, z: torch.Tensor) -> torch.Tensor:
        """g(z) = a z + b."""
        return z @ self.a.T + self.b

    def student_cov(self) -> torch.Tensor:
        """Covariance of p_theta(x) = N(alpha b, alpha^2 a a^T + sigma^2 I)."""
        return self.alpha**2 * self.a @ self.a.T + self.sigma**2 * torch.eye(2, dtype=torch.float64)

    def gap(self, x: torch.Tensor) -> Gap:
        """sigma (s_q - s_phi), both exact."""
        s_q = -(x - self.mean) @ torch.linalg.inv(self.cov)
        s_p = -(x - self.alpha * self.b) @ torch.linalg.inv(self.student_cov())
        return Gap(self.sigma * (s_q - s_p))

    def joint(self) -> dict[str, torch.Tensor]:
        """Moments of rho(x, z) = q(x) p(z | x): mean x, mean z, cov x, cov xz, cov z."""
        gain = self.alpha * self.a.T @ torch.linalg.inv(self.student_cov())
        posterior = torch.eye(2, dtype=torch.float64) - gain @ (self.alpha * self.a)  # Cov z given x
        z, zz = gain @ (self.mean - self.alpha * self.b), posterior + gain @ self.cov @ gain.T
        return {"x": self.mean, "z": z, "xx": self.cov, "xz": self.cov @ gain.T, "zz": zz}

    def likelihood_gradient(self) -> torch.Tensor:
        """d/da E_q[log p_theta(x)] = alpha / sigma^2 E_rho[(x - alpha g(z)) z^T], the forward-KL direction."""
        m = self.joint()
        x_z = m["xz"] + torch.outer(m["x"], m["z"])
        z_z = m["zz"] + torch.outer(m["z"], m["z"])
        return self.alpha / self.sigma**2 * (x_z - self.alpha * (self.a @ z_z + torch.outer(self.b, m["z"])))


@dataclass(frozen=True)
class MixtureResult:
    """Mass near the minor mode, forward KL at the noise level, and the trained student."""

    minor_mass: float
    forward_kl: float
    a: torch.Tensor
    b: torch.Tensor


def mixture_distance(a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> tuple[float, float]:
    """(minor mass, forward KL) of the student N(b, a a^T + sigma^2 I), from 20,000 draws each."""
    gen = torch.Generator().manual_seed(seed)
    x = _teacher_samples(20_000, gen)
    clean = torch.randn(20_000, 2, generator=gen, dtype=torch.float64) @ a.T + b
    mass = (torch.linalg.vector_norm(clean - _MODES[0], dim=1) < 1.5).double().mean()
    student = torch.distributions.MultivariateNormal(b, a @ a.T + _SIGMA**2 * torch.eye(2, dtype=torch.float64))
    return float(mass), float((_log_teacher(x) - student.log_prob(x)).mean())


def train_mixture(config: EStepConfig, seed: int = 0, steps: int = 600, batch: int = 256) -> MixtureResult:
    """A student g(z) = a z + b that is too small for its teacher: it must cover two modes or drop one.

    Target 0.2 N((-2.5, 0), 0.25 I) + 0.8 N((2.5, 0), 0.25 I), one noise level sigma 0.5, exact scores.
    """
    gen = torch.Generator().manual_seed(seed)
    a = (2 * torch.eye(2, dtype=torch.float64)).requires_grad_(True)
    b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a, b], lr=1e-2, betas=(0.0, 0.99))
    alpha, sigma = torch.ones((), dtype=torch.float64), torch.tensor(_SIGMA, dtype=torch.float64)
    for step in range(steps):
        frozen_a, frozen_b = a.detach(), b.detach()
        z, eps = (torch.randn(batch, 2, generator=gen, dtype=torch.float64) for _ in range(2))
        rho = Joint(partial(_affine, frozen_a, frozen_b), _mixture_gap(frozen_a, frozen_b), NoiseLevels(alpha, sigma))
        end = e_step(rho, z, eps, config, normal_from(gen))
        y = end.z @ a.T + b
        loss = (0.5 * (y - (y + sigma * end.r).detach()).square()).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        adam.step()
    return MixtureResult(*mixture_distance(a.detach(), b.detach()), a.detach(), b.detach())


_SIGMA, _SPREAD = 0.5, 0.5
_MODES = torch.tensor([[-2.5, 0.0], [2.5, 0.0]], dtype=torch.float64)
_LOG_SHARE = torch.tensor([0.2, 0.8], dtype=torch.float64).log()


def _affine(a: torch.Tensor, b: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return z @ a.T + b


def _teacher_samples(count: int, gen: torch.Generator) -> torch.Tensor:
    side = (torch.rand(count, generator=gen, dtype=torch.float64) < 0.8).long()
    width = math.hypot(_SPREAD, _SIGMA)
    return _MODES[side] + width * torch.randn(count, 2, generator=gen, dtype=torch.float64)


def _log_joint(x: torch.Tensor) -> torch.Tensor:
    var = _SPREAD**2 + _SIGMA**2
    return _LOG_SHARE - (x[:, None] - _MODES).square().sum(-1) / (2 * var) - math.log(2 * math.pi * var)


def _log_teacher(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(_log_joint(x), 1)


def _mixture_gap(a: torch.Tensor, b: torch.Tensor) -> GapOf:
    precision = torch.linalg.inv(a @ a.T + _SIGMA**2 * torch.eye(2, dtype=torch.float64))

    def gap(x: torch.Tensor) -> Gap:
        share = torch.softmax(_log_joint(x), 1)
        s_q = (share @ _MODES - x) / (_SPREAD**2 + _SIGMA**2)
        return Gap(_SIGMA * (s_q + (x - b) @ precision))

    return gap
