"""The weight of low-level control over the noise level: gamma_c(t) of Berrada et al. 2024 (arXiv 2411.03177, 2.1).

Size conditioning is off while the layout forms and rises to full weight while details form: with u the
network's timestep over T (0 clean, 1 noise), gamma(1) = 0 and gamma(0) = 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch

from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..settings.option import Option, Options

FORMS = ("power_cos", "cos_pow", "linear", "step", "constant")
DRAWN = "drawn"
"""A further form: the curve through the points of :attr:`GammaConfig.points`."""
CLOCKS = ("native", "paper_sigma")
Points = tuple[tuple[float, float], ...]
Number = float | torch.Tensor


def gamma(u: Number, form: str = "power_cos", alpha: float = 1.0, step_at: float = 0.5) -> Any:
    """Weight in [0, 1] at u in [0, 1], non-increasing in u; computed in float64 on the CPU.

    The paper names the curve (power-cosine) and its direction but gives no formula; ``power_cos`` is that of MDT
    (masked_diffusion/models.py), which the paper builds on, ``cos_pow`` is the other reading. Equal at alpha = 1.

    Args:
        u: a number or a tensor of any shape; 0 is clean, 1 is noise.
        form: one of FORMS. ``step`` is 1 up to ``step_at`` and 0 above; ``constant`` is 1, as in SDXL.
        alpha: decay rate of the two cosine forms, above 0.

    Returns:
        A float for a number, a float64 tensor of u's shape for a tensor.
    """
    GammaConfig(form, alpha, step_at)
    weight = _weights(u, lambda v: _CURVES[form](v, alpha, step_at))
    return weight if isinstance(u, torch.Tensor) else float(weight)


def _weights(u: Number, curve: Callable[[float], float]) -> torch.Tensor:
    """Evaluates a curve at every u in plain Python: for a few batch rows, torch calls would be slower."""
    v = torch.as_tensor(u, dtype=torch.float64, device="cpu")
    weights = [_weight(x, curve) for x in v.flatten().tolist()]
    return torch.tensor(weights, dtype=torch.float64).reshape(v.shape)


def _weight(u: float, curve: Callable[[float], float]) -> float:
    if not -1e-6 <= u <= 1 + 1e-6:  # float32 values may overshoot by rounding; NaN fails too
        raise refuse("u", u, "values in [0, 1]", "divide the timestep by the training steps")
    return curve(min(1.0, max(0.0, u)))


def _power_cos(u: float, alpha: float, step_at: float) -> float:
    # Berrada et al. 2.1, Fig. 3, as in MDT: (1 - cos(pi (1 - u)^alpha)) / 2
    return (1 - math.cos(math.pi * (1 - u) ** alpha)) / 2


def _cos_pow(u: float, alpha: float, step_at: float) -> float:
    # The other reading: ((1 + cos(pi u)) / 2)^alpha
    return ((1 + math.cos(math.pi * u)) / 2) ** alpha


_CURVES: dict[str, Callable[[float, float, float], float]] = {
    "power_cos": _power_cos,
    "cos_pow": _cos_pow,
    "linear": lambda u, alpha, step_at: 1 - u,
    "step": lambda u, alpha, step_at: float(u <= step_at),
    "constant": lambda u, alpha, step_at: 1.0,
}


@cache
def read_points(text: str) -> Points:
    """((progress, weight), ...) by rising progress, from ``0:0, 0.5:0.2, 1:1``.

    Progress is 1 - u: 0 is the initial noise, 1 the finished image, for any number of steps.
    """
    remedy = "0:0, 0.5:0.2, 1:1 is a curve: timestep's fraction of the run, then weight"
    try:
        pairs = [tuple(float(x) for x in part.split(":")) for part in text.replace(";", ",").split(",") if part.strip()]
        points = sorted((progress, weight) for progress, weight in pairs)
    except ValueError as error:
        raise refuse("points", text, "progress:weight, with commas between", remedy) from error
    if not points or not all(0 <= x <= 1 for point in points for x in point):
        raise refuse("points", text, "one point or more, all numbers in [0, 1]", remedy)
    if len({progress for progress, _ in points}) < len(points):
        raise refuse("points", text, "one weight per progress", remedy)
    return tuple(points)


def _interpolated(points: Points, u: float) -> float:
    """Linear interpolation between the points, constant before the first and after the last."""
    progress = 1 - u
    after = bisect_right(points, (progress, math.inf))
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)


def half_weight_time(alpha: float) -> float:
    """The u at which ``power_cos`` is 0.5."""
    # (1 - u)^alpha = 1/2
    return 1 - 2 ** (-1 / alpha)


@dataclass(frozen=True)
class GammaConfig(Options):
    """A gamma curve and its clock. A trained checkpoint has its own, which takes precedence."""

    form: Annotated[
        str,
        Option(
            "Curve of the weight over the noise level: 0 at full noise, 1 at none. constant: as the stock model.",
            choices=(*FORMS, DRAWN),
            details="drawn goes through ``points``.",
        ),
    ] = "power_cos"
    alpha: Annotated[
        float,
        Option(
            "How late the size sets in. 1 suits untrained use; at 8 it acts on the last tenth of the run only.",
            gt=0,
            top=32,
            step=0.05,
            remedy="1.0 for training-free use",
        ),
    ] = 1.0
    step_at: Annotated[
        float,
        Option(
            "Where the form step goes from 1 to 0.",
            ge=0,
            lt=1,
            node=False,
            remedy="0.5 is half of the timesteps",
        ),
    ] = 0.5
    clock: Annotated[
        str,
        Option(
            "native: the timestep that conditions the network. paper_sigma: for flow models, by their noise level.",
            choices=CLOCKS,
            details="The flow time tau is mapped to sigma = tau / (1 - tau), and that to the nearest "
            "timestep of the paper's own beta table.",
        ),
    ] = "native"
    steps: Annotated[
        int,
        Option(
            "Training timesteps, not sampling steps.",
            ge=1,
            node=False,
            remedy="most models have 1000",
        ),
    ] = 1000
    points: Annotated[
        str,
        Option(
            "A curve of your own instead of the form, as progress:weight. 0:0, 0.5:0.2, 1:1 begins at 0 and ends at 1. "
            "Empty: the form.",
        ),
    ] = ""

    def _check(self) -> None:
        """Points belong to the form drawn."""
        if (self.form == DRAWN) != bool(self.points):
            raise refuse(
                "form, points", (self.form, self.points), f"points with {DRAWN}, no other form", "see read_points"
            )
        if self.points:
            read_points(self.points)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without empty points."""
        return {name: value for name, value in super().to_dict().items() if name != "points" or value}

    def u(self, t: Number) -> torch.Tensor:
        """Timesteps in [0, steps] -> u in [0, 1], float64 on the CPU, the same shape."""
        u = torch.as_tensor(t, dtype=torch.float64, device="cpu") / self.steps
        return u if self.clock == "native" else _paper_clock(u)

    def weight(self, u: torch.Tensor) -> torch.Tensor:
        """gamma(u), float64, the shape of u."""
        return _weights(u, self._curve)

    def at(self, t: Number) -> torch.Tensor:
        """gamma at the network's timesteps, float64 on the CPU, of their shape."""
        return self.weight(self.u(t))

    def number(self, t: float) -> float:
        """:meth:`at` for one timestep, without torch, whose overhead is noticeable for small models."""
        return _weight(t / self.steps, self._curve) if self.clock == "native" else float(self.at(t))

    def _curve(self, u: float) -> float:
        if self.points:
            return _interpolated(read_points(self.points), u)
        return _CURVES[self.form](u, self.alpha, self.step_at)


@cache
def _paper_table() -> torch.Tensor:
    return NoiseSchedule.scaled_linear(1000).log_sigmas


def _paper_clock(tau: torch.Tensor) -> torch.Tensor:
    table = _paper_table()
    # sigma = tau / (1 - tau); the signal scaled by 1 / (1 - tau) is the paper's x0 + sigma eps
    log_sigma = torch.logit(tau.clamp(0, 1)).clamp(table[0], table[-1])
    return (log_sigma[..., None] - table).abs().argmin(-1).double() / len(table)
