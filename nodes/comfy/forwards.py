"""Forwards of a MODEL: one outside a sampler, and context managers around each one that a clone runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.conds
import comfy.model_sampling
import comfy.patcher_extension
import torch

from ...engine.errors import refuse
from ...engine.network.condition import Condition
from ...engine.tracing.reading import OtherRows
from . import compat_comfyui as core
from .carried import CARRIED, Carried, applied
from .own_patches import owner_of, put_wrapper, remove_wrappers
from .python_forwards import PythonForward
from .running import OTHER, RUN, Part, Running, one_forward, running_in, watched
from .schedule import clock_of, share_of

_WRAPPERS = comfy.patcher_extension.WrappersMP
_ROW_PATCHES = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch")
"""Core's patches that see the rows inside attention."""
LISTED = "[]"
"""Between the name and the number of a tensor that the network takes in a list."""


# --- around a clone's forwards ------------------------------------------------------------------------------------
@dataclass
class Forward:
    """One network call that is about to run. A context manager may change what it passes on.

    Attributes:
        base: ComfyUI's BaseModel around the network.
        x: (B, C, H, W) noisy latents in ComfyUI's scale.
        sigma: (B,) noise levels.
        options: transformer_options, a dict of this call's own.
        conditions: further conditions by keyword, such as ``y``; a dict of this call's own.
    """

    base: Any
    x: torch.Tensor
    sigma: torch.Tensor
    options: dict[str, Any]
    conditions: dict[str, Any]

    @property
    def network(self) -> torch.nn.Module:
        """The network, whose sites have addresses."""
        return self.base.diffusion_model

    @property
    def timestep(self) -> float:
        """The first row's timestep; of flows 1000 s, whatever scale the network takes."""
        return float(clock_of(self.base.model_sampling)(self.sigma[:1]))

    @property
    def running(self) -> Running | None:
        """The run it belongs to; None where no guider runs it."""
        return running_in(self.options)

    @property
    def share(self) -> float:
        """How much of the run's steps is over, 0 to below 1. Outside a run: of the schedule's timesteps."""
        running = self.running
        if running is None or not running.steps:
            return share_of(self.base.model_sampling, self.sigma)
        return running.step_of(self.options.get("sigmas", self.sigma))[0] / running.steps

    @property
    def parts(self) -> list[Part]:
        """What the equal parts of the batch are, in its order."""
        return [OTHER] if self.running is None else self.running.parts(self.options)

    def by_row(self, values: list[Any]) -> torch.Tensor:
        """(B,) from one value for each part."""
        if len(self.x) % len(values) or not (self.running is None or self.running.whole(self.x, len(values))):
            remedy = "remove what splits or tiles the batch, or let it act on the whole batch (branch both, no tokens)"
            raise refuse("batch", f"a batch of {len(self.x)} for {len(values)} prompts", "equal parts", remedy)
        return torch.tensor(values).repeat_interleave(len(self.x) // len(values))

    @property
    def positive_rows(self) -> torch.Tensor:
        """(B,) bool: rows that have the positive prompt."""
        unknown = [part.name for part in self.parts if part.prompted is None]
        if unknown:
            accepted = "conditionings of core's guiders, or ones with a prompt_type"
            remedy = "let it act on all rows, or use a guider of ComfyUI's own (Perp-Neg Guider for Perp-Neg)"
            raise refuse("the prompt's part of the batch", f"unknown of {', '.join(unknown)}", accepted, remedy)
        return self.by_row([bool(part.prompted) for part in self.parts])

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """(B,) tokens of each row's own prompt, where core may have repeated it; 0 where it has not."""
        return self.by_row([part.tokens or 0 for part in self.parts])


@dataclass
class Run:
    """A sampling run that is about to start. A context manager may change what it passes on.

    Attributes:
        guider: ComfyUI's guider; ``guider.conds`` are this run's own.
        noise: (B, C, H, W).
        sigmas: (steps + 1,) noise levels, the last one 0.
        output: latents that came out, once it is over; None before.
    """

    guider: Any
    noise: torch.Tensor
    sigmas: torch.Tensor
    output: torch.Tensor | None = None

    @property
    def running(self) -> Running:
        """What its forwards know of it; of clones that are ``watched``."""
        running: Running = self.guider.model_options["transformer_options"][RUN]
        return running


def around_forwards(model: Any, key: str, context: Callable[[Forward], AbstractContextManager]) -> Any:
    """A clone whose every forward runs inside ``context(forward)``. Nothing is on the network between forwards.

    Forwards of another network that core runs with this clone's options, such as that of the negative in its Dual Model
    CFG Guider, are left alone.
    """

    def apply_model(
        executor: Any,
        x: Any,
        t: Any,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **conditions: Any,
    ) -> Any:
        forward = Forward(executor.class_obj, x, t, dict(transformer_options or {}), conditions)
        if forward.running is not None and not forward.running.owns(forward.base):
            own = {k: v for k, v in conditions.items() if not k.startswith("vitrine_")}
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **own)
        with PythonForward(forward.options) as python:
            forward.options["wrappers"] = python.wrappers
            with context(forward), naming_patches(forward.options):
                output = executor(x, t, c_concat, c_crossattn, control, forward.options, **forward.conditions)
        return output

    return _wrapped(watched(model), _WRAPPERS.APPLY_MODEL, key, apply_model, context)


def around_sampling(model: Any, key: str, context: Callable[[Run], AbstractContextManager]) -> Any:
    """A clone whose every sampling run happens inside ``context(run)``, which ends also when the run is interrupted."""

    def outer_sample(
        executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Any, *args: Any, **kwargs: Any
    ) -> Any:
        run = Run(executor.class_obj, noise, sigmas)
        with context(run):
            run.output = executor(run.noise, latent, sampler, run.sigmas, *args, **kwargs)
        return run.output

    return _wrapped(watched(model), _WRAPPERS.OUTER_SAMPLE, key, outer_sample, context)


@contextmanager
def naming_patches(options: dict[str, Any]) -> Iterator[None]:
    """Around a forward: where a layer has other batch rows than the network, say whose patch of attention is there."""
    try:
        yield
    except OtherRows as error:
        patches = options.get("patches", {})
        owners = {owner_of(patch) for name in _ROW_PATCHES for patch in patches.get(name, [])}
        raise OtherRows(f"{error} ({', '.join(sorted(owners)) or 'no attention patch of the MODEL'})") from error


def _wrapped(model: Any, kind: str, key: str, wrapper: Callable, context: Callable) -> Any:
    wrapper.__module__ = context.__module__  # Active Patches names the module that asked for it, not this one
    clone = model.clone()
    put_wrapper(clone, kind, key, wrapper)
    return clone


def without(model: Any, key: str) -> Any:
    """A clone without the wrappers and the attachment under a key."""
    clone = model.clone()
    for kind in (_WRAPPERS.APPLY_MODEL, _WRAPPERS.OUTER_SAMPLE):
        remove_wrappers(clone, kind, key)
    clone.remove_attachments(key)
    return clone


# --- one forward outside a sampler --------------------------------------------------------------------------------
def clean_prediction(model: Any, x: torch.Tensor, sigma: torch.Tensor, cond: Condition) -> torch.Tensor:
    """x0 (B, C, H, W) from one network call at sigma (B,), through the same functions of core as a sampler's step.

    So everything on the MODEL that acts on a forward acts here. What acts on a run does not, for there is none:
    guidance, caches across steps, and context windows, which would take the rows for frames of one video.
    """
    options = core.create_model_options_clone(model.model_options)
    options.pop("context_handler", None)
    inner = options["transformer_options"]
    parts = [part | {"uuid": uuid.uuid4()} for part in _parts(model, cond, sigma)]
    with applied(model, parts, options) as conds:
        for name, value in inner.items():
            if hasattr(value, "clone") and not isinstance(value, torch.Tensor):
                inner[name] = (
                    value.clone()
                )  # state of one run, such as EasyCache's: it would grow on the MODEL for ever
        inner["sample_sigmas"] = torch.cat([sigma[:1], sigma.new_zeros(1)])
        inner[RUN] = running = one_forward(model, [part["uuid"] for part in parts])
        inner["wrappers"] = PythonForward(inner).wrappers
        try:
            with running.on(model):
                model.pre_run()
            core.cast_to_load_options(options, model.load_device, model.model_dtype())
            with naming_patches(inner):
                return core.calc_cond_batch(model.model, [conds["positive"]], x, sigma, options)[0]
        except BaseException:  # a tap ends its forward early by one
            core.drop_recording()
            raise
        finally:
            core.cast_to_load_options(options, model.offload_device)
            model.cleanup()


def velocity(model: Any, x: torch.Tensor, sigma: torch.Tensor, cond: Condition) -> torch.Tensor:
    """A flow network's eps - x0 (B, C, H, W) at sigma (B,), 0 included: nothing is divided by sigma.

    Core turns each output v into x - sigma v, and combines what several parts give linearly. In this call it turns it
    into x - v, so that v is left over.
    """
    sampling = model.get_model_object("model_sampling")
    if type(sampling).calculate_denoised is not comfy.model_sampling.CONST.calculate_denoised:
        shown, remedy = type(sampling).__name__, "remove the sampling patch"
        raise refuse("model sampling", shown, "a rectified flow whose network puts out a velocity", remedy)
    sampling.calculate_denoised = lambda sigma, output, x: x - output
    try:
        return x - clean_prediction(model, x, sigma, cond)
    finally:
        del sampling.calculate_denoised


def _parts(model: Any, cond: Condition, sigma: torch.Tensor) -> list[dict[str, Any]]:
    """Core's settings of each prompt, from the engine's condition."""
    named = {k: v for k, v in ({"c_crossattn": cond.text} | cond.extra).items() if v is not None}
    fixed = dict(cond.fixed)
    carried: Carried | None = fixed.pop(CARRIED, None)
    if model.get_attachment("vitrine.control") is None:  # another model of the same method may have it
        named = {k: v for k, v in named.items() if not k.startswith("vitrine_")}
    lists: dict[str, list[torch.Tensor]] = {}
    for name in sorted(k for k in named if LISTED in k):
        lists.setdefault(name.split(LISTED)[0], []).append(named.pop(name))
    model_conds: dict[str, Any] = {k: comfy.conds.CONDRegular(v) for k, v in named.items()}
    model_conds |= {k: comfy.conds.CONDList(v) for k, v in lists.items()}
    model_conds |= {k: comfy.conds.CONDConstant(v) for k, v in fixed.items()}
    if carried is None:
        return [{"model_conds": model_conds}]
    ranges = [control for control in carried.controls if control.timestep_percent_range != (0.0, 1.0)]
    if ranges and not bool((sigma == sigma[0]).all()):
        accepted = "one noise level for all rows, or a ControlNet for the whole run"
        raise refuse("ControlNet", "for a part of the run", accepted, "set start_percent 0 and end_percent 1")
    return [carried.settings | {"model_conds": model_conds}, *carried.others]
