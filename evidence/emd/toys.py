"""A student in two dimensions where everything is known: the linear-Gaussian chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...engine.emd.chain import Joint, NoiseLevels, ScoreDifference


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
            tensor([0.5, -0.3]),
            tensor([[1.3, 0.4], [0.4, 0.9]]),
            tensor([[0.9, -0.3], [0.2, 0.7]]),
            tensor([0.2, 0.1]),
            tensor(0.8),
            tensor(0.6),
        )

    def rho(self) -> Joint:
        """The density that the chain samples."""
        return Joint(self.net, self.difference, NoiseLevels(self.alpha, self.sigma))

    def net(self, z: torch.Tensor) -> torch.Tensor:
        """g(z) = a z + b."""
        return z @ self.a.T + self.b

    def student_cov(self) -> torch.Tensor:
        """Covariance of p_theta(x) = N(alpha b, alpha^2 a a^T + sigma^2 I)."""
        return self.alpha**2 * self.a @ self.a.T + self.sigma**2 * torch.eye(2, dtype=torch.float64)

    def difference(self, x: torch.Tensor) -> ScoreDifference:
        """sigma (s_q - s_phi), both exact."""
        s_q = -(x - self.mean) @ torch.linalg.inv(self.cov)
        s_p = -(x - self.alpha * self.b) @ torch.linalg.inv(self.student_cov())
        return ScoreDifference(self.sigma * (s_q - s_p))

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
