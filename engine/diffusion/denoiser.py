"""One wrapper for each prediction *convention*, so that methods do not depend on the model family.

``predict`` turns the output of eps, v, x0 and flow networks into the same pair (eps, x0). Make a denoiser with
:meth:`Denoiser.from_diffusers`; ``nodes/comfy/model.py`` makes one from a ComfyUI MODEL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import refuse
from ..families import call_of
from ..network.condition import Condition
from ..runtime.compat_torch import version_of
from ..runtime.compiled import uncompiled
from ..runtime.stored_weights import as_numbers
from .schedule import NoiseSchedule, Number, append_dims, convention_of

PREDICTIONS = ("eps", "v", "x0", "flow")


class Prediction(NamedTuple):
    """Noise and clean latent, each of x_t's shape; x_t = signal x0 + noise eps holds exactly."""

    eps: torch.Tensor
    x0: torch.Tensor


@dataclass(frozen=True)
class Denoiser:
    """A backbone with its schedule and prediction convention.

    Attributes:
        backbone: the UNet or transformer that is called.
        schedule: its sigmas, alpha-bars and timesteps.
        prediction: ``"eps" | "v" | "x0" | "flow"``, what ``call`` returns.
        call: (x_t (B, C, H, W), t (B,), Condition) -> (B, C, H, W), the bare network.
        learned: the convention that the network was trained with, where ``call`` converts its output, as ComfyUI does;
            empty if it equals ``prediction``.
        made_of: returns what identifies the network where its modules do not, as in ComfyUI, which applies LoRAs and
            patches on loading; None: its modules.
    """

    backbone: nn.Module
    schedule: NoiseSchedule
    prediction: str
    call: Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
    learned: str = ""
    made_of: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.prediction not in PREDICTIONS:
            raise refuse("prediction", self.prediction, PREDICTIONS, "see the scheduler's prediction_type")
        flow = self.schedule.kind == "flow"
        if self.prediction not in (("flow", "x0") if flow else ("eps", "v", "x0")):
            pair = (self.prediction, self.schedule.kind)
            raise refuse("prediction and schedule", pair, "flow or x0 with a flow's schedule", "match them")

    @classmethod
    def from_diffusers(cls, model: Any, scheduler: Any = None) -> Denoiser:
        """From a pipeline, or from a UNet / transformer and a scheduler."""
        parts = (getattr(model, name, None) for name in ("unet", "transformer"))
        backbone = uncompiled(next((part for part in parts if part is not None), model))
        scheduler = getattr(model, "scheduler", None) if scheduler is None else scheduler
        if scheduler is None:
            raise refuse("scheduler", None, "a diffusers scheduler", "pass a pipeline, or scheduler=...")
        call = call_of(backbone)
        return cls(backbone, *convention_of(scheduler, backbone), call)

    @property
    def inputs(self) -> dict[str, object]:
        """What results depend on, as inputs of a :class:`~vitrine.engine.jobs.run.Run`."""
        network = self.backbone if self.made_of is None else self.made_of()
        return {"network": network, "noise schedule": [self.schedule, self.prediction, self.learned]}

    def network_input(self, x0: torch.Tensor, noise: torch.Tensor, t: Number) -> torch.Tensor:
        """x_t in the scale the network expects, for t a number or (B,)."""
        return self.schedule.add_noise(x0, noise, t)

    def forward(self, x_t: torch.Tensor, t: Number, cond: Condition) -> torch.Tensor:
        """One network call: x_t (B, C, H, W) in the network's input scale at t, a number or (B,)."""
        rows = torch.as_tensor(t, dtype=torch.float32, device=x_t.device).reshape(-1).expand(len(x_t))
        return self.call(x_t, rows, cond)

    def predict(self, x_t: torch.Tensor, t: Number, cond: Condition) -> Prediction:
        """(eps, x0) from one call, converted in float32 or wider."""
        return self.split(self.forward(x_t, t, cond), x_t, t)

    def split(self, output: torch.Tensor, x_t: torch.Tensor, t: Number) -> Prediction:
        """(eps, x0) from the network's output for x_t, in float32 or wider (for v: Salimans & Ho 2022, App. D)."""
        wide = torch.promote_types(output.dtype, torch.float32)
        x, y = x_t.to(wide), output.to(wide)
        signal, noise = (append_dims(s.to(x.device, wide), x.ndim) for s in self.schedule.scales(t))
        if self.prediction == "eps":
            return Prediction(y, (x - noise * y) / signal)
        if self.prediction == "x0":
            return Prediction((x - signal * y) / noise, y)
        if self.prediction == "v":  # v = signal eps - noise x0
            return Prediction(signal * y + noise * x, signal * x - noise * y)
        return Prediction(x + signal * y, x - noise * y)  # flow: the velocity is eps - x0

    def error(
        self, output: torch.Tensor, x_t: torch.Tensor, x0: torch.Tensor, noise: torch.Tensor, t: Number
    ) -> torch.Tensor:
        """Output minus training target, (B, ...), for the input x_t made of x0 and noise at t.

        The difference is in the convention of training: in units of eps, an error of v counts signal^2 times and one
        of a flow's velocity (1 - s)^2 times, which is close to zero at high noise.
        """
        signal, level = (append_dims(s.to(noise.device, noise.dtype), noise.ndim) for s in self.schedule.scales(t))
        learned = self.learned or self.prediction
        if learned != self.prediction:
            eps, clean = self.split(output, x_t, t)
            output = training_target(learned, clean, eps, signal, level)
        return output.to(noise.dtype) - training_target(learned, x0.to(noise.dtype), noise, signal, level)

    def with_call(self, call: Callable) -> Denoiser:
        """The same denoiser with another network call, such as a wrapper or an offloaded copy."""
        return replace(self, call=call)


def training_target(
    prediction: str, x0: torch.Tensor, noise: torch.Tensor, signal: torch.Tensor, level: torch.Tensor
) -> torch.Tensor:
    """The target of a network of this convention for the input signal x0 + level noise; all share one shape."""
    if prediction == "v":
        return signal * noise - level * x0  # Salimans & Ho 2022, App. D
    return {"eps": noise, "x0": x0, "flow": noise - x0}[prediction]  # the velocity: Lipman et al. 2023; Liu et al. 2023


def check_finite(module: nn.Module, name: str = "model") -> None:
    """Refuses a module with NaN or infinite weights. Synchronises once with each device that has weights."""
    weights = {k: v for k, v in module.state_dict().items() if v.is_floating_point() and not v.is_meta}
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in weights.values():  # NaN and infinity propagate through a sum
        value = as_numbers(value)
        by_device.setdefault(value.device, []).append(value.to(torch.promote_types(value.dtype, torch.float32)).sum())
    if all(bool(torch.isfinite(torch.stack(sums)).all()) for sums in by_device.values()):
        return
    bad = next((key for key, value in weights.items() if not bool(torch.isfinite(as_numbers(value)).all())), None)
    if bad is not None:
        raise refuse(f"{name} weights", f"NaN or Inf in {bad!r}", "finite numbers", "load the checkpoint again")


def weights_state(module: nn.Module) -> int:
    """A number that changes when weights are replaced or written in place; no device synchronisation."""
    return hash(tuple((id(p), version_of(p)) for p in module.parameters()))
