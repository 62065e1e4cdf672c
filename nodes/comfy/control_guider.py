"""Eq. 2 as a ComfyUI guider, and a run under it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    (True, True): "positive",
    (False, True): "null",
    (False, False): "negative",
    (True, False): "controlled_negative",
}
"""(with control, with semantics) -> the name of the conditioning."""
_EVALUATE = "sampler_calc_cond_batch_function"
"""Core's option with a node's own way of evaluating the prompt and the negative prompt."""
_GUIDED = 0.0
"""Any guidance scale but 1, at which the negative prompt is not evaluated."""


class ControlGuider(comfy.samplers.CFGGuider):
    """Eq. 2 of Berrada et al. 2024. ``log`` has a ControlStep for each call of the last run.

    Core's own guider does a step, and is handed the prompt under Eq. 2 in place of the prompt. So what acts on it acts
    here: patches of guidance, the scale of one step (CFG Override), other ways of evaluating (Skip Layer Guidance).
    """

    def __init__(self, model: Any, positive: list, negative: list, config: GuidanceConfig) -> None:
        super().__init__(model)
        self.config, self.log = config, list[Any]()
        self.weighting = weighting_of(model)
        self.checkpoint = self.weighting.checkpoint if self.weighting is not None else None
        if self.checkpoint is None and self.config.size_guidance != 1:
            size_input(model.model)
        if self.checkpoint is not None and not any(SIZES in settings for _, settings in positive):
            raise refuse("positive", "no size values", "Size and Crop Values before it", "its model was trained so")
        roles = {
            "positive": positive,
            "negative": null_control(negative),
            "null": null_control(positive, "positive"),
            "controlled_negative": same_control(negative, positive, "negative"),
        }
        guided = replace(config, scale=_GUIDED)  # a node may set the scale of a step
        evaluations = (*needed_evaluations(guided), *needed_evaluations(guided, 0.0, True))
        needed = {_ROLES[k] for k in evaluations} | {"positive", "negative"}
        self.inner_set_conds({role: cond for role, cond in roles.items() if role in needed})
        self.set_cfg(config.scale)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """One run; the log begins anew."""
        self.log = []
        return super().sample(*args, **kwargs)

    def predict_noise(self, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
        """One step's x0 by core's own guidance, with as many evaluations as can matter."""
        options = model_options or {}
        evaluate = partial(self._evaluated, options)
        return super().predict_noise(x, timestep, options | {_EVALUATE: evaluate}, seed)

    def _evaluated(self, options: dict, call: dict) -> list[torch.Tensor]:
        """[prompt under Eq. 2, what guidance leads away from]: core asks for both, and for one without guidance.

        Args:
            options: the step's own, in which another node may have its way of evaluating these two.
            call: what core tells such a function.
        """
        x, timestep, guided = call["input"], call["sigma"], call["conds"][1] is not None
        by_core = lambda c: core.calc_cond_batch(call["model"], c["conds"], x, timestep, c["model_options"])  # noqa: E731
        of_two = options.get(_EVALUATE, by_core)
        if call["conds"][0] is not self.conds["positive"]:  # a patch evaluates conditionings of its own
            return of_two(call)
        t, weight, null = self._now(x, timestep)
        keys = set(needed_evaluations(replace(self.config, scale=_GUIDED if guided else 1.0), weight, null))
        order = self._order(keys)
        conds = [self._conds_of(key, keys) if key in keys else None for key in order]
        if _EVALUATE in options:
            pair = of_two(call | {"conds": conds[:2], "model_options": options})
            batch = [*pair, *core.calc_cond_batch(self.inner_model, conds[2:], x, timestep, options)]
        else:
            batch = core.calc_cond_batch(self.inner_model, conds, x, timestep, options)
        predictions = dict(zip(order, batch, strict=True))
        without_scale = replace(self.config, scale=1.0)
        inner = control_guidance(lambda c, s: predictions[c, s], without_scale, weight, null).prediction
        self.log.append(ControlStep(t, float(timestep.max()), weight, len(keys)))
        return [inner, batch[1]]

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


def run(guider: ControlGuider, latent: dict, seed: int, sampler: str, sigmas: torch.Tensor) -> dict:
    """Sample as core's KSampler does, under a guider; a new LATENT."""
    model, samples = guider.model_patcher, latent["samples"]
    ratios = (latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
    samples = comfy.sample.fix_empty_latent_channels(model, samples, *ratios)
    noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
    callback = latent_preview.prepare_callback(model, len(sigmas) - 1)
    sampled = guider.sample(
        noise,
        samples,
        comfy.samplers.sampler_object(sampler),
        sigmas,
        denoise_mask=latent.get("noise_mask"),
        callback=callback,
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    unchanged = {k: v for k, v in latent.items() if not k.startswith("downscale_ratio")}
    return unchanged | {"samples": sampled.to(comfy.model_management.intermediate_device())}
