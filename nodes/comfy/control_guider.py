"""Eq. 2 as a ComfyUI guider, and a run under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import torch

from ...engine.control import ControlStep, GuidanceConfig, control_guidance, needed_evaluations
from ...engine.control.size_guidance import Key
from ...engine.errors import refuse
from . import compat_comfyui as core
from .carried import SIZES
from .conditioning import PIXELS, high_is_null, null_control, same_control
from .control import size_input, weighting_of
from .schedule import clock_of

_ROLES: dict[Key, str] = {
    (True, True): "positive", (False, True): "null", (False, False): "negative", (True, False): "controlled_negative",
}  # fmt: skip
"""(with control, with semantics) -> the name of the conditioning."""


class ControlGuider(comfy.samplers.CFGGuider):
    """Eq. 2 of Berrada et al. 2024. ``log`` has a ControlStep for each call of the last run.

    The outer guidance goes through ComfyUI's own, so that patches of it (Rescale CFG and others) still act.
    """

    def __init__(self, model: Any, positive: list, negative: list, config: GuidanceConfig) -> None:
        super().__init__(model)
        self.config, self.log = config, list[Any]()
        self.weighting = weighting_of(model)
        self.checkpoint = self.weighting.checkpoint if self.weighting is not None else None
        if self.checkpoint is None and self.config.control != 1:
            size_input(model.model)
        if self.checkpoint is not None and not any(SIZES in settings for _, settings in positive):
            raise refuse("positive", "no size values", "Size and Crop Values before it", "its model was trained so")
        roles = {
            "positive": positive, "negative": null_control(negative), "null": null_control(positive, "positive"),
            "controlled_negative": same_control(negative, positive, "negative"),
        }  # fmt: skip
        evaluations = (*needed_evaluations(config), *needed_evaluations(config, 0.0, True))
        needed = {_ROLES[k] for k in evaluations} | {"positive", "negative"}
        self.inner_set_conds({role: cond for role, cond in roles.items() if role in needed})
        self.set_cfg(config.scale)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """One run; the log begins anew."""
        self.log = []
        return super().sample(*args, **kwargs)

    def predict_noise(self, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
        """One step's x0, with as many evaluations as can matter."""
        options = model_options or {}
        t, weight, null = self._now(x, timestep)
        keys = set(needed_evaluations(self.config, weight, null))
        if options.get("disable_cfg1_optimization", False):
            keys.add(self.config.unconditional)
        order = self._order(keys)
        conds = [self._conds_of(k, keys) if k in keys else None for k in order]
        batch = core.calc_cond_batch(self.inner_model, conds, x, timestep, options)
        predictions = {k: v for k, v in zip(order, batch, strict=True) if k in keys}
        without_scale = replace(self.config, scale=1.0)
        inner = control_guidance(lambda c, s: predictions[c, s], without_scale, weight, null).prediction
        outer = self.config.unconditional
        outer = outer if outer in predictions else (False, False)  # the same where the control has no weight yet
        unconditional = predictions.get(outer, torch.zeros_like(inner))
        self.log.append(ControlStep(t, float(timestep.max()), weight, len(keys)))
        unconditional = torch.zeros_like(inner) if unconditional is None else unconditional
        return outer_guidance(self, [inner, unconditional], x, timestep, options)

    def _order(self, keys: set[Key]) -> list[Key]:
        """Core's order, on which patches count: the prompt, what guidance leads away from, then the others."""
        prompt = (True, True) if (True, True) in keys else (False, True)
        away = self.config.unconditional if self.config.unconditional in keys else (False, False)
        return [prompt, away, *(key for key in _ROLES if key not in (prompt, away))]

    def _conds_of(self, key: Key, keys: set[Key]) -> list:
        """The conditionings of an evaluation. Where the null control is all there is of the prompt, it counts as it."""
        conds: list = self.conds[_ROLES[key]]
        positive = self.conds["positive"]
        if key != (False, True) or (True, True) in keys or len(conds) != len(positive):
            return conds
        return [null | {"uuid": own["uuid"]} for null, own in zip(conds, positive, strict=True)]

    def _now(self, x: Any, timestep: Any) -> tuple[float, float, bool]:
        """The network's timestep, the largest weight, and whether the high-level control is null."""
        sampling = self.inner_model.model_sampling
        if self.weighting is None:
            return float(sampling.timestep(timestep).max()), 1.0, False
        times = clock_of(sampling)(timestep)
        weight = float(self.weighting.gamma.at(times).max())
        if self.checkpoint is not None:
            return float(times.max()), weight, self.checkpoint.embedder.h is None
        size = (x.shape[-2] * PIXELS, x.shape[-1] * PIXELS)
        return float(times.max()), weight, all(high_is_null(c, size) for c in self.conds["positive"])


def outer_guidance(guider: Any, out: list, x: Any, timestep: Any, options: dict) -> Any:
    """Guidance between two predictions [positive, negative] as core's sampling_function does it, patches included."""
    positive, negative = guider.conds["positive"], guider.conds["negative"]
    call = {
        "conds": [positive, negative], "cond_scale": guider.config.scale, "input": x, "timestep": timestep,
        "sigma": timestep, "model": guider.inner_model, "model_options": options,
    }  # fmt: skip
    for patch in options.get("sampler_pre_cfg_function", []):
        out = patch(call | {"conds_out": out})
    return core.cfg_function(
        guider.inner_model, out[0], out[1], guider.config.scale, x, timestep, model_options=options, cond=positive,
        uncond=negative,
    )  # fmt: skip


def run(guider: ControlGuider, latent: dict, seed: int, sampler: str, sigmas: torch.Tensor) -> dict:
    """Sample as core's KSampler does, under a guider; a new LATENT."""
    model, samples = guider.model_patcher, latent["samples"]
    ratios = (latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
    samples = comfy.sample.fix_empty_latent_channels(model, samples, *ratios)
    noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
    callback = latent_preview.prepare_callback(model, len(sigmas) - 1)
    sampled = guider.sample(
        noise, samples, comfy.samplers.sampler_object(sampler), sigmas, denoise_mask=latent.get("noise_mask"),
        callback=callback, disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED, seed=seed,
    )  # fmt: skip
    unchanged = {k: v for k, v in latent.items() if not k.startswith("downscale_ratio")}
    return unchanged | {"samples": sampled.to(comfy.model_management.intermediate_device())}
