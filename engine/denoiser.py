"""One wrapper for each model *convention*, so that no method needs to know the model's family.

``predict`` turns the output of eps, v, x0 and flow networks into the same pair (eps, x0). Denoisers are made by
:meth:`Denoiser.from_diffusers`, and by ``nodes/comfy/model.py`` from a ComfyUI MODEL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .condition import Condition
from .errors import refuse
from .families import call_of
from .schedule import NoiseSchedule, Number, append_dims

PREDICTIONS = ("eps", "v", "x0", "flow")


class Prediction(NamedTuple):
    """Noise and clean latent, each of x_t's shape; x_t = signal x0 + noise eps holds exactly."""

    eps: torch.Tensor
    x0: torch.Tensor


@dataclass(frozen=True)
class Denoiser:
    """A backbone with its schedule and prediction convention.

    Attributes:
        backbone: the module whose activations have addresses.
        schedule: its sigmas, alpha-bars and timesteps.
        prediction: ``"eps" | "v" | "x0" | "flow"``, what ``call`` returns.
        call: (x_t (B, C, H, W), t (B,), Condition) -> (B, C, H, W), the bare network.
    """

    backbone: nn.Module
    schedule: NoiseSchedule
    prediction: str
    call: Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]

    def __post_init__(self) -> None:
        if self.prediction not in PREDICTIONS:
            raise refuse("prediction", self.prediction, PREDICTIONS, "see the scheduler's prediction_type")
        if (self.prediction == "flow") != (self.schedule.kind == "flow"):
            pair = (self.prediction, self.schedule.kind)
            raise refuse("prediction and schedule", pair, "flow with flow", "match them")

    @classmethod
    def from_diffusers(cls, model: Any, scheduler: Any = None) -> Denoiser:
        """From a pipeline, or from a UNet / transformer and a scheduler.

        Raises:
            VitrineError: If the backbone belongs to no known family, or there is no scheduler.
        """
        backbone = getattr(model, "unet", None) or getattr(model, "transformer", None) or model
        scheduler = scheduler or getattr(model, "scheduler", None)
        if scheduler is None:
            raise refuse("scheduler", None, "a diffusers scheduler", "pass a pipeline, or scheduler=...")
        schedule = NoiseSchedule.from_diffusers(scheduler)
        kinds = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
        prediction = "flow" if schedule.kind == "flow" else kinds.get(scheduler.config.prediction_type, "unknown")
        return cls(backbone, schedule, prediction, call_of(backbone))

    def network_input(self, x0: torch.Tensor, noise: torch.Tensor, t: Number) -> torch.Tensor:
        """x_t in the scale the network expects, for t a number or (B,)."""
        return self.schedule.add_noise(x0, noise, t)

    def forward(self, x_t: torch.Tensor, t: Number, cond: Condition) -> torch.Tensor:
        """One bare network call in the network's own scale: (B, C, H, W) at t, a number or (B,); what taps run."""
        rows = torch.as_tensor(t, dtype=torch.float32, device=x_t.device).reshape(-1).expand(len(x_t))
        return self.call(x_t, rows, cond)

    def predict(self, x_t: torch.Tensor, t: Number, cond: Condition) -> Prediction:
        """(eps, x0) from one call, converted in float32 or wider (for v: Salimans & Ho 2022, App. D)."""
        output = self.forward(x_t, t, cond)
        wide = torch.promote_types(output.dtype, torch.float32)
        x, y = x_t.to(wide), output.to(wide)
        signal, noise = (append_dims(s.to(x.device), x.ndim).to(wide) for s in self.schedule.scales(t))
        if self.prediction == "eps":
            return Prediction(y, (x - noise * y) / signal)
        if self.prediction == "x0":
            return Prediction((x - signal * y) / noise, y)
        if self.prediction == "v":  # v = signal eps - noise x0
            return Prediction(signal * y + noise * x, signal * x - noise * y)
        return Prediction(x + signal * y, x - noise * y)  # flow: the velocity is eps - x0

    def with_call(self, call: Callable) -> Denoiser:
        """The same denoiser with another bare call (a wrapper, an offloaded copy)."""
        return replace(self, call=call)


def check_finite(module: nn.Module, name: str = "model") -> None:
    """Refuses a module with NaN or infinite weights.

    Raises:
        VitrineError: If there is such a weight; the message names the first tensor.
    """
    for key, value in module.state_dict().items():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise refuse(f"{name} weights", f"NaN or Inf in {key!r}", "finite numbers", "load the checkpoint again")
