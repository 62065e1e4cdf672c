"""One wrapper for each model *convention*, so that no method asks which family a model is of.

``predict`` turns eps, v, x0 and flow networks into the same pair (eps, x0). Two makers: :meth:`Denoiser.from_diffusers`
here, and ``nodes/bridge.py`` for a ComfyUI MODEL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import refuse
from .schedule import NoiseSchedule, Number

PREDICTIONS = ("eps", "v", "x0", "flow")


@dataclass(frozen=True)
class Condition:
    """What a network is told beside x_t and t. All tensors carry the batch first.

    Attributes:
        text: (B, T, C) text states, or None.
        pooled: (B, D) pooled text embedding, or None.
        extra: further tensors by the backbone's own argument name (``time_ids``, ``encoder_attention_mask`` ...).
    """

    text: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Condition:
        text, pooled = (None if v is None else fn(v) for v in (self.text, self.pooled))
        return Condition(text, pooled, {k: fn(v) for k, v in self.extra.items()})

    def take(self, rows: torch.Tensor) -> Condition:
        """Rows by index (they may repeat). A condition of one row serves any index."""
        return self._map(lambda v: v[rows.to(v.device)] if len(v) > 1 else v.expand(len(rows), *v.shape[1:]))

    def repeat(self, times: int) -> Condition:
        """The whole batch ``times`` times in a row."""
        return self._map(lambda v: v.repeat(times, *[1] * (v.ndim - 1)))

    def to(self, *where: Any, **how: Any) -> Condition:
        """``Tensor.to`` on every part."""
        return self._map(lambda v: v.to(*where, **how))

    def cast(self, dtype: torch.dtype) -> Condition:
        """Floating parts in ``dtype``; masks and ids stay as they are."""
        return self._map(lambda v: v.to(dtype) if v.is_floating_point() else v)

    @staticmethod
    def batch(parts: Sequence[Condition]) -> Condition:
        """Stack conditions of the same kind along the batch."""
        if len({(p.text is None, p.pooled is None, tuple(p.extra)) for p in parts}) != 1:
            kinds = [(p.text is not None, p.pooled is not None, sorted(p.extra)) for p in parts]
            raise refuse("conditions", kinds, "the same parts in each", "encode all prompts with the same pipeline")

        def cat(values: list[torch.Tensor | None]) -> torch.Tensor | None:
            present = [v for v in values if v is not None]
            return torch.cat(present) if present else None

        extra = {k: torch.cat([p.extra[k] for p in parts]) for k in parts[0].extra}
        return Condition(cat([p.text for p in parts]), cat([p.pooled for p in parts]), extra)


class Prediction(NamedTuple):
    """Noise and clean latent, each of x_t's shape; x_t = signal x0 + noise eps holds exactly."""

    eps: torch.Tensor
    x0: torch.Tensor


@dataclass(frozen=True)
class Denoiser:
    """A backbone with its schedule and prediction convention.

    Attributes:
        backbone: the module whose insides have addresses.
        schedule: sigma, alpha-bar, timestep maps.
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
            given = (self.prediction, self.schedule.kind)
            raise refuse("prediction and schedule", given, "flow with flow", "match them")

    @classmethod
    def from_diffusers(cls, model: Any, scheduler: Any = None) -> Denoiser:
        """From a pipeline, or from a UNet / transformer and a scheduler.

        Raises:
            VitrineError: no UNet, PixArt, SD3 or Flux transformer is recognised.
        """
        from .diffusers_calls import call_of

        backbone = getattr(model, "unet", None) or getattr(model, "transformer", None) or model
        scheduler = scheduler or getattr(model, "scheduler", None)
        if scheduler is None:
            raise refuse("scheduler", None, "a diffusers scheduler", "pass a pipeline, or scheduler=...")
        schedule = NoiseSchedule.from_diffusers(scheduler)
        kinds = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
        prediction = "flow" if schedule.kind == "flow" else kinds.get(scheduler.config.prediction_type, "unknown")
        return cls(backbone, schedule, prediction, call_of(backbone))

    def network_input(self, x0: torch.Tensor, noise: torch.Tensor, t: Number) -> torch.Tensor:
        """x_t as the network wants it, for t a number or (B,)."""
        return self.schedule.add_noise(x0, noise, t)

    def forward(self, x_t: torch.Tensor, t: Number, cond: Condition) -> torch.Tensor:
        """One bare network call in the network's own scale: (B, C, H, W) at t, a number or (B,). What taps run."""
        rows = torch.as_tensor(t, dtype=torch.float32, device=x_t.device).reshape(-1).expand(len(x_t))
        return self.call(x_t, rows, cond)

    def predict(self, x_t: torch.Tensor, t: Number, cond: Condition) -> Prediction:
        """(eps, x0) from one call. Conversions in float32 at least (Salimans & Ho 2022, App. D for v)."""
        output = self.forward(x_t, t, cond)
        wide = torch.promote_types(output.dtype, torch.float32)
        x, y = x_t.to(wide), output.to(wide)
        signal, noise = (self.schedule._wide(s, x).to(wide) for s in self.schedule.scales(t))
        if self.prediction == "eps":
            return Prediction(y, (x - noise * y) / signal)
        if self.prediction == "x0":
            return Prediction((x - signal * y) / noise, y)
        if self.prediction == "v":  # v = signal eps - noise x0
            return Prediction(signal * y + noise * x, signal * x - noise * y)
        return Prediction(x + signal * y, x - noise * y)  # flow: the velocity is eps - x0

    def with_call(self, call: Callable) -> Denoiser:
        """The same denoiser through another bare call (a wrapper, an offloaded copy)."""
        return replace(self, call=call)


def check_finite(module: nn.Module, name: str = "model") -> None:
    """Refuse a module with NaN or infinite weights, naming the first bad tensor.

    Raises:
        VitrineError: such a tensor was found.
    """
    for key, value in module.state_dict().items():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise refuse(f"{name} weights", f"NaN or Inf in {key!r}", "finite numbers", "load the checkpoint again")
