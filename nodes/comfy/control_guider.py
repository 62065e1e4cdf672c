"""Eq. 2 as a ComfyUI guider, and a run under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import node_helpers
import torch

from ...engine.control import ControlStep, GuidanceConfig, guide, needed
from ...engine.errors import refuse
from .control import PIXELS, TOLD, clock_of, controlled_like, high_is_null, nulled, size_family, weighting_of

_NAMES = {(True, True): "positive", (False, True): "null", (False, False): "negative", (True, False): "told_negative"}


class ControlGuider(comfy.samplers.CFGGuider):
    """Eq. 2 of Berrada et al. 2024. ``log`` has a ControlStep for each call of the last run.

    The outer guidance goes through ComfyUI's own, so that patches of it (Rescale CFG and others) still act.

    Raises:
        VitrineError: control guidance on a model without control, or of a positive without control values.
    """

    def __init__(self, model: Any, positive: list, negative: list, config: GuidanceConfig) -> None:
        super().__init__(model)
        self.config, self.log = config, list[Any]()
        self.weighting = weighting_of(model)
        self.own = self.weighting.checkpoint if self.weighting is not None else None
        self._check(model, positive)
        made = {
            "positive": positive, "negative": nulled(negative),
            "null": node_helpers.conditioning_set_values(nulled(positive), {"prompt_type": "positive"}),
            "told_negative": node_helpers.conditioning_set_values(
                controlled_like(negative, positive), {"prompt_type": "negative"}
            ),
        }  # fmt: skip
        asked = {_NAMES[k] for k in (*needed(config), *needed(config, 0.0, True))} | {"positive", "negative"}
        self.inner_set_conds({k: v for k, v in made.items() if k in asked})
        self.set_cfg(config.scale)

    def _check(self, model: Any, positive: list) -> None:
        if self.own is None and self.config.control != 1:
            size_family(model)
        if self.own is not None and not any(TOLD in d for _, d in positive):
            raise refuse("positive", "no control values", "Control Values before it", "its model was trained so")

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """One run; the log begins anew."""
        self.log = []
        return super().sample(*args, **kwargs)

    def predict_noise(self, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
        """One step's x0, with as many evaluations as can matter."""
        options = model_options or {}
        t, weight, null = self._now(x, timestep)
        keys = needed(self.config, weight, null)
        evaluated = keys
        if options.get("disable_cfg1_optimization", False):
            evaluated = tuple(sorted({*keys, (False, False)}))
        conds = [self.conds[_NAMES[k]] for k in evaluated]
        made = comfy.samplers.calc_cond_batch(self.inner_model, conds, x, timestep, options)
        found = dict(zip(evaluated, made, strict=True))
        inner = guide(lambda c, s: found[c, s], replace(self.config, scale=1.0), weight, null).prediction
        none = found.get((False, False))
        self.log.append(ControlStep(t, float(timestep.max()), weight, len(evaluated)))
        return self._outer(inner, torch.zeros_like(inner) if none is None else none, x, timestep, options)

    def _outer(self, inner: Any, none: Any, x: Any, timestep: Any, options: dict) -> Any:
        positive, negative = self.conds["positive"], self.conds["negative"]
        told = {"conds": [positive, negative], "cond_scale": self.config.scale, "input": x, "timestep": timestep}
        told |= {"sigma": timestep, "model": self.inner_model, "model_options": options}
        out = [inner, none]
        for fn in options.get("sampler_pre_cfg_function", []):
            out = fn(told | {"conds_out": out})
        return comfy.samplers.cfg_function(
            self.inner_model, out[0], out[1], self.config.scale, x, timestep, model_options=options, cond=positive,
            uncond=negative,
        )  # fmt: skip

    def _now(self, x: Any, timestep: Any) -> tuple[float, float, bool]:
        """The network's timestep, the largest weight, and whether the high-level control is null."""
        sampling = self.inner_model.model_sampling
        if self.weighting is None:
            return float(sampling.timestep(timestep).max()), 1.0, False
        times = clock_of(sampling)(timestep)
        weight = float(self.weighting.gamma.at(times).max())
        if self.own is not None:
            return float(times.max()), weight, self.own.embedder.h is None
        size = (x.shape[-2] * PIXELS, x.shape[-1] * PIXELS)
        return float(times.max()), weight, all(high_is_null(c, size) for c in self.conds["positive"])


# --- sampling -----------------------------------------------------------------------------------------------------
def sigmas_of(model: Any, sampler: str, scheduler: str, steps: int, denoise: float) -> torch.Tensor:
    """The levels core KSampler would take."""
    made = comfy.samplers.KSampler(model, steps, model.load_device, sampler, scheduler, denoise, model.model_options)
    return made.sigmas


def run(guider: ControlGuider, latent: dict, seed: int, sampler: str, sigmas: torch.Tensor) -> dict:
    """Sample as core's KSampler does, under a guider; a new LATENT."""
    model, samples = guider.model_patcher, latent["samples"]
    ratios = (latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
    samples = comfy.sample.fix_empty_latent_channels(model, samples, *ratios)
    noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
    callback = latent_preview.prepare_callback(model, len(sigmas) - 1)
    made = guider.sample(
        noise, samples, comfy.samplers.sampler_object(sampler), sigmas, denoise_mask=latent.get("noise_mask"),
        callback=callback, disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED, seed=seed,
    )  # fmt: skip
    kept = {k: v for k, v in latent.items() if not k.startswith("downscale_ratio")}
    return kept | {"samples": made.to(comfy.model_management.intermediate_device())}
