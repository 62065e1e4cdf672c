"""diffusers schedulers under Eq. 3: always a new object; the argument is never changed."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..diffusion.schedule import setting_of
from ..errors import refuse
from .plan import ModelFacts, Plan
from .shift import flux_shift, resample, trained_betas


def transferred_scheduler(scheduler: Any, facts: ModelFacts, plan: Plan) -> Any:
    """The scheduler of a plan; ``scheduler`` itself if there is nothing to do.

    ``relabel`` keeps the class and sets new betas. ``resample`` keeps the class if it accepts arbitrary sigmas;
    DDIM, PNDM and others over integer timesteps become EulerDiscreteScheduler, whose step equals DDIM with eta 0.
    """
    if plan.schedule == "none":
        return scheduler
    if plan.schedule == "relabel":
        if "trained_betas" not in scheduler.config:
            raise refuse("scheduler", type(scheduler).__name__, "one with trained_betas", "use DDIM, Euler or DPM++")
        betas = trained_betas(facts.schedule, plan.ratio)
        return type(scheduler).from_config(scheduler.config, trained_betas=betas, rescale_betas_zero_snr=False)
    base, changes = _steps_over_sigmas(scheduler), {}
    if setting_of(scheduler, "use_dynamic_shifting"):  # the r law, anchored at the training size
        changes = {"use_dynamic_shifting": False, _shift_name(scheduler): facts.shift}
    resampled = _resampled(base).from_config(scheduler.config, **changes)
    resampled.ratio, resampled.network_schedule = plan.ratio, facts.schedule
    return resampled


def _steps_over_sigmas(scheduler: Any) -> type:
    """The class to derive from."""
    from diffusers import EulerDiscreteScheduler

    config, name = scheduler.config, type(scheduler).__name__
    if scheduler.order != 1 or config.get("invert_sigmas") or config.get("timestep_type") == "continuous":
        accepted = "first-order and multistep schedulers over a table, or FlowMatchEuler"
        raise refuse("scheduler", name, accepted, "use EulerDiscreteScheduler or DPMSolverMultistepScheduler")
    if hasattr(scheduler, "sigmas"):
        return type(scheduler)
    return EulerDiscreteScheduler


@functools.lru_cache(None)
def _resampled(base: type) -> Any:
    """A subclass of ``base`` that shifts every sampling grid."""

    @functools.wraps(base.set_timesteps)  # type: ignore[attr-defined]
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        if not setting_of(self, "use_dynamic_shifting"):
            kwargs.pop("mu", None)  # pipelines that shift by size always pass it, and DPM++ refuses it
        base.set_timesteps(self, *args, **kwargs)  # type: ignore[attr-defined]
        sigmas, timesteps = resample(self.network_schedule, self.sigmas.cpu().double(), self.ratio)
        self.sigmas = sigmas.to(self.sigmas)
        self.timesteps = timesteps[:-1].to(self.timesteps)
        # Several points may share a timestep; looking up the first by its timestep would then skip a step.
        self.set_begin_index(0)

    return type(f"Resampled{base.__name__}", (base,), {"set_timesteps": set_timesteps, "__module__": __name__})


def own_shift(scheduler: Any, tokens: int) -> tuple[float, tuple[int, int, float, float] | None]:
    """(a flow scheduler's own shift for a number of tokens, the numbers of its linear law or None)."""
    config = scheduler.config
    if not setting_of(scheduler, "use_dynamic_shifting"):
        return float(setting_of(scheduler, _shift_name(scheduler)) or 1.0), None
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    low_tokens, most, low, high = (config.get(n) for n in names)
    law = (low_tokens or 256, most or 4096, low or 0.5, high or 1.15)
    shift = flux_shift(tokens, *law)
    return (math.log(shift) if config.get("time_shift_type") == "linear" else shift), law


def _shift_name(scheduler: Any) -> str:
    """The shift's name in its class: a scheduler made from another's config has both names."""
    return "shift" if setting_of(scheduler, "shift") is not None else "flow_shift"
