"""Which timestep a forward of a pipeline's network has, and how much of the run is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..diffusion.forward_clock import Timesteps
from ..families import family_of
from ..runtime.compat_diffusers import run_length

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


def clock_of(pipe: DiffusionPipeline, net: ModelMixin) -> Callable[[tuple, dict[str, Any]], float]:
    """(args, kwargs) of a forward of a pipeline's network -> its timestep on the scheduler's scale of 0..1000."""
    timesteps, time_input = Timesteps(), family_of(net).time_input

    def now(args: tuple, kwargs: dict[str, Any]) -> float:
        if time_input != "timestep" and hasattr(pipe.scheduler, "step_index"):
            # the scheduler counts its steps from the first
            step = pipe.scheduler.begin_index if pipe.scheduler.step_index is None else pipe.scheduler.step_index
            args, kwargs = (), {"timestep": pipe.scheduler.timesteps[step or 0]}
        t = timesteps.first(args, kwargs)
        assert t is not None
        return t

    return now


def share_of(pipe: DiffusionPipeline, net: ModelMixin) -> Callable[[tuple, dict[str, Any]], float]:
    """(args, kwargs) of a forward of a pipeline's network -> how much of the run's steps is over, 0 to below 1.

    A run that begins late, as image to image does, or ends early, as SDXL's base before its refiner, is counted by
    its own steps.
    """
    clock, known, begin = clock_of(pipe, net), [torch.empty(0), torch.empty(0)], 0

    def now(args: tuple, kwargs: dict[str, Any]) -> float:
        nonlocal begin
        t, source = clock(args, kwargs), pipe.scheduler.timesteps
        first = source is not known[0]
        if first:
            known[:] = source, source.detach().cpu().double()
        times = known[1]
        step = int((times - t).abs().argmin())
        begin = step if first else begin
        steps = min(run_length(pipe) or len(times), len(times) - begin)
        return min(max(0, step - begin), steps - 1) / steps

    return now
