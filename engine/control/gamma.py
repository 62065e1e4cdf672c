"""The weight of low-level control over the noise level: gamma_c(t) of Berrada et al. 2024 (arXiv 2411.03177, 2.1).

Size metadata is switched off while the picture's layout forms and grows to full weight while details form: with u the
network's timestep over T (0 clean, 1 noise), gamma(1) = 0 and gamma(0) = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..config import Config
from ..errors import refuse
from ..schedule import NoiseSchedule

FORMS = ("power_cos", "cos_pow", "linear", "step", "constant")
CLOCKS = ("native", "paper_sigma")
Number = float | torch.Tensor


def gamma(u: Number, form: str = "power_cos", alpha: float = 1.0, step_at: float = 0.5) -> Any:
    """Weight in [0, 1] at u in [0, 1], non-increasing in u; computed in float64 on the CPU.

    The paper names the curve (power-cosine) and its direction but prints no formula; ``power_cos`` is that of MDT
    (masked_diffusion/models.py), which the paper builds on, ``cos_pow`` the other reading. Equal at alpha = 1.

    Args:
        u: a number or a tensor of any shape; 0 is clean, 1 is noise.
        form: one of FORMS. ``step`` is 1 up to ``step_at`` and 0 above; ``constant`` is 1, as in SDXL.
        alpha: decay rate of the two cosine forms, above 0.

    Returns:
        A float for a number, a float64 tensor of u's shape for a tensor.

    Raises:
        VitrineError: ``u`` leaves [0, 1], the form is unknown, or ``alpha`` is not positive.
    """
    check_form(form, alpha, step_at)
    v = torch.as_tensor(u, dtype=torch.float64, device="cpu")
    if not bool(((v >= -1e-6) & (v <= 1 + 1e-6)).all()):  # a float32 clock may overshoot by a rounding; NaN fails too
        raise refuse("u", v.flatten()[:4].tolist(), "values in [0, 1]", "divide the timestep by the training steps")
    weight = _CURVES[form](v.clamp(0, 1), alpha, step_at)
    return weight if isinstance(u, torch.Tensor) else float(weight)


def check_form(form: str, alpha: float, step_at: float) -> None:
    """Refuse a curve that does not exist.

    Raises:
        VitrineError: The form is unknown, or a number is outside its range.
    """
    if form not in FORMS:
        raise refuse("form", form, FORMS, "power_cos is the paper's")
    if not (math.isfinite(alpha) and alpha > 0):
        raise refuse("alpha", alpha, "a finite number above 0", "1.0 for training-free use")
    if not 0 <= step_at < 1:
        raise refuse("step_at", step_at, "0 <= step_at < 1", "0.5 is half of the timesteps")


def _power_cos(u: torch.Tensor, alpha: float, step_at: float) -> torch.Tensor:
    # Berrada et al. 2.1, Fig. 3, as in MDT: (1 - cos(pi (1 - u)^alpha)) / 2
    return (1 - torch.cos(math.pi * (1 - u) ** alpha)) / 2


def _cos_pow(u: torch.Tensor, alpha: float, step_at: float) -> torch.Tensor:
    # The other reading: ((1 + cos(pi u)) / 2)^alpha
    return ((1 + torch.cos(math.pi * u)) / 2) ** alpha


_CURVES = {
    "power_cos": _power_cos,
    "cos_pow": _cos_pow,
    "linear": lambda u, alpha, step_at: 1 - u,
    "step": lambda u, alpha, step_at: (u <= step_at).double(),
    "constant": lambda u, alpha, step_at: torch.ones_like(u),
}


def half_weight_time(alpha: float) -> float:
    """The u at which ``power_cos`` weighs 0.5."""
    # (1 - u)^alpha = 1/2
    return 1 - 2 ** (-1 / alpha)


@dataclass(frozen=True)
class GammaConfig(Config):
    """One curve with its clock. A trained checkpoint brings its own, which widgets must not override.

    Attributes:
        form, alpha, step_at: see :func:`gamma`.
        clock: ``native``: u = timestep / steps. ``paper_sigma``, for flow models: the flow time tau is mapped to
            sigma = tau / (1 - tau), and that to the nearest timestep of the paper's own beta table.
        steps: T, what a timestep is divided by. Never the number of sampling steps.

    Raises:
        VitrineError: The form or the clock is unknown, or a number is outside its range.
    """

    form: str = "power_cos"
    alpha: float = 1.0
    step_at: float = 0.5
    clock: str = "native"
    steps: int = 1000

    def __post_init__(self) -> None:
        check_form(self.form, self.alpha, self.step_at)
        if self.clock not in CLOCKS:
            raise refuse("clock", self.clock, CLOCKS, "paper_sigma is for flow models")
        if self.steps < 1:
            raise refuse("steps", self.steps, "1 or more", "most models have 1000")

    def u(self, t: Number) -> torch.Tensor:
        """Timesteps in [0, steps] -> u in [0, 1], float64 on the CPU, the same shape."""
        share = torch.as_tensor(t, dtype=torch.float64, device="cpu") / self.steps
        return share if self.clock == "native" else _paper_clock(share)

    def weight(self, u: torch.Tensor) -> torch.Tensor:
        """gamma(u), float64, the shape of u."""
        return gamma(u, self.form, self.alpha, self.step_at)

    def at(self, t: Number) -> torch.Tensor:
        """gamma at the network's timesteps, float64, their shape: what previews and samplers read."""
        return self.weight(self.u(t))


@cache
def _paper_table() -> torch.Tensor:
    return NoiseSchedule.scaled_linear(1000).log_sigmas


def _paper_clock(tau: torch.Tensor) -> torch.Tensor:
    table = _paper_table()
    # sigma = tau / (1 - tau); a signal scaled by 1 / (1 - tau) is the paper's x0 + sigma eps
    log_sigma = torch.logit(tau.clamp(0, 1)).clamp(table[0], table[-1])
    return (log_sigma[..., None] - table).abs().argmin(-1).double() / len(table)
