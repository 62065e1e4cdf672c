"""ComfyUI's model_sampling and the engine's NoiseSchedule as forms of each other, and the levels of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import comfy.model_sampling
import comfy.samplers
import torch

from ...engine.diffusion.schedule import NoiseSchedule
from ...engine.errors import VitrineError, refuse
from ...engine.resolution import Plan, shift_grid
from . import compat_comfyui as core

SAMPLERS = comfy.samplers.SAMPLER_NAMES
SCHEDULERS = comfy.samplers.SCHEDULER_NAMES
"""ComfyUI's own lists, so that what other packs add to them is on offer too."""
_WITHOUT_STEPS = (comfy.model_sampling.ModelSamplingDiscreteEDM, comfy.model_sampling.StableCascadeSampling)
"""Subclasses of ModelSamplingDiscrete whose networks take a logarithm or a fraction instead of a timestep."""


def schedule_of(model: Any) -> NoiseSchedule:
    """The noise schedule of a MODEL."""
    sampling = model.get_model_object("model_sampling")
    if isinstance(sampling, comfy.model_sampling.CONST):
        return NoiseSchedule.flow()
    if not hasattr(sampling, "log_sigmas"):
        raise refuse("model sampling", type(sampling).__name__, "a sigma table or a flow", "remove the sampling patch")
    return _from_table(sampling)


def _from_table(sampling: Any) -> NoiseSchedule:
    table = sampling.log_sigmas.cpu().double()
    # ModelSamplingDiscreteDistilled (LCM) keeps every skip_steps-th level; the network's time still runs to 999.
    return NoiseSchedule("vp", table, len(table) * getattr(sampling, "skip_steps", 1))


def clock_of(sampling: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """sigma (B,) -> timesteps (B,) of 1000, float64 on the CPU: what the network takes."""
    if isinstance(sampling, comfy.model_sampling.CONST):
        return lambda sigma: sigma.cpu().double() * 1000
    if isinstance(sampling, comfy.model_sampling.ModelSamplingDiscrete) and not isinstance(sampling, _WITHOUT_STEPS):
        return lambda sigma: sampling.timestep(sigma).cpu().double()
    shown, remedy = [c.__name__ for c in type(sampling).__mro__[:2]], "EDM models have none; remove the sampling patch"
    raise refuse("model sampling", shown, "one with timesteps of 1000, or a flow", remedy)


def share_of(sampling: Any, sigma: torch.Tensor) -> float:
    """How much of a model's noise levels lie above the first of sigma (B,): 0 at the noisiest, below 1."""
    try:
        return max(0.0, 1 - float(clock_of(sampling)(sigma[:1])) / 999)
    except VitrineError:  # no timesteps: the levels themselves
        levels = sampling.sigmas
        return float((levels > sigma[:1].to(levels)).float().mean())


def run_sigmas(model: Any, sampler: str, scheduler: str, steps: int, denoise: float) -> torch.Tensor:
    """(steps + 1,) the levels that core's KSampler would take."""
    settings = comfy.samplers.KSampler(
        model, steps, model.load_device, sampler, scheduler, denoise, model.model_options
    )
    return settings.sigmas


# --- schedules moved to another resolution ------------------------------------------------------------------------
def movable_schedule(sampling: Any) -> NoiseSchedule:
    """The schedule of a sampling class that :func:`moved_sampling` can move."""
    flows = (comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.ModelSamplingFlux)
    if isinstance(sampling, flows):
        return NoiseSchedule.flow()
    if not isinstance(sampling, comfy.model_sampling.ModelSamplingDiscrete) or isinstance(sampling, _WITHOUT_STEPS):
        accepted = "ModelSamplingDiscrete, ModelSamplingDiscreteFlow, ModelSamplingFlux"
        remedy = "this model is told its noise level without a table; use its own ModelSampling node"
        raise refuse("model sampling", [c.__name__ for c in type(sampling).__mro__[:2]], accepted, remedy)
    return _from_table(sampling)


def own_shift(sampling: Any) -> float:
    """A flow model's shift; ModelSamplingFlux keeps its logarithm."""
    if isinstance(sampling, comfy.model_sampling.ModelSamplingFlux):
        return math.exp(sampling.shift)
    return float(getattr(sampling, "shift", 1.0))


def moved_sampling(own: Any, plan: Plan) -> Any:
    """A new model_sampling of the model's own prediction class, with the plan's noise levels."""
    new = copy.deepcopy(own)
    if isinstance(own, comfy.model_sampling.ModelSamplingFlux):
        new.set_parameters(shift=own.shift + math.log(plan.ratio), timesteps=len(own.sigmas))
    elif isinstance(own, comfy.model_sampling.ModelSamplingDiscreteFlow):
        audio = {"audio_shift": own.audio_shift} if hasattr(own, "audio_shift") else {}
        shift = own.shift * plan.ratio
        new.set_parameters(shift=shift, timesteps=len(own.sigmas), multiplier=own.multiplier, **audio)
    elif plan.schedule == "relabel":
        new.set_sigmas(own.sigmas.double() * plan.ratio)
    else:
        core.change_class(new, _resampled(type(own)))
        new.trained = copy.deepcopy(own)
        new.set_sigmas(shift_grid(own.sigmas.double(), plan.ratio, float(own.sigmas[-1])))
    return new


def _resampled(base: type) -> type:
    """A sampling class whose table is the shifted one, while the network takes the nearest entry of its own table."""

    class Resampled(base):  # type: ignore[misc, valid-type]
        """Its two directions are not each other's inverse, on purpose."""

        def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
            return self.trained.timestep(sigma)

    return Resampled
