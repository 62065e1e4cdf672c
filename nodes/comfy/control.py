"""Control conditioning on a MODEL: the weight of its size conditioning, and control checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.conds
import folder_paths
import torch

from ...engine.control import (
    ControlCheckpoint,
    GammaConfig,
    added_delta,
    blend,
    load_control,
    reference_input,
    time_embedding,
    weighted_delta,
)
from ...engine.control.reference_blend import Reference
from ...engine.errors import refuse
from ...engine.families import FAMILIES, record_of
from ...engine.families.facts import SizeInput
from ...engine.portraits.shipped import TRANSFORMERS
from ...engine.runtime.forward_hooks import Reached, hook_after
from ...engine.runtime.stored_weights import as_numbers
from . import compat_comfyui as core
from .carried import NULL, SIZES
from .conditioning import CONTROL, PIXELS
from .forwards import Forward, Run, around_forwards, around_sampling, without
from .model import PREFIX, backbone_of, checkpoint_weights
from .own_patches import put_weights
from .saved import known_files, stamp, stamp_of
from .schedule import clock_of

KEY = CONTROL
FOLDER = "vitrine_control"
_VALUES, _DROP = "vitrine_values", "vitrine_drop"

if FOLDER not in folder_paths.folder_names_and_paths:
    folder_paths.add_model_folder_path(FOLDER, str(Path(folder_paths.models_dir) / FOLDER))


@dataclass(frozen=True)
class Weighting:
    """Attached to a MODEL: the curve, and the neutral size or the checkpoint it weighs."""

    gamma: GammaConfig
    reference: Reference = "target"
    checkpoint: ControlCheckpoint | None = None

    def model_conds(self, cond: dict, size: tuple[int, int]) -> dict[str, Any]:
        """What travels with a conditioning to the model; the same keys for all, so that they still batch.

        Args:
            cond: the conditioning's settings.
            size: (height, width) of the picture in pixels.
        """
        if self.checkpoint is None:
            return {_DROP: comfy.conds.CONDRegular(torch.tensor([[bool(cond.get(NULL))]]))}
        spec, sizes = self.checkpoint.embedder.spec, cond.get(SIZES)
        drop = sizes is None or bool(cond.get(NULL))
        values = spec.rows(spec.reference() if sizes is None else sizes.controls(size, spec))
        return {_VALUES: comfy.conds.CONDRegular(values), _DROP: comfy.conds.CONDRegular(torch.tensor([[drop]]))}


def weighting_of(model: Any) -> Weighting | None:
    """What Size Weight Schedule or Load Size Checkpoint put on a MODEL."""
    return model.get_attachment(KEY)


@dataclass(frozen=True)
class _Controlled:
    """One forward under a weighting.

    Attributes:
        values: (B, controls) of a control checkpoint, or None.
        drop: (B, 1) bool, the rows without control, or None: no row.
    """

    weighting: Weighting
    forward: Forward
    values: torch.Tensor | None
    drop: torch.Tensor | None

    @property
    def timesteps(self) -> torch.Tensor:
        """(B,) timesteps of 1000, float64 on the CPU."""
        return clock_of(self.forward.base.model_sampling)(self.forward.sigma)

    @property
    def weights(self) -> torch.Tensor:
        """(B,) gamma of each row's timestep, 0 in rows without control."""
        weights = self.weighting.gamma.at(self.timesteps)
        return weights if self.drop is None else weights.masked_fill(self.drop[:, 0].cpu(), 0.0)


def _applied(model: Any, weighting: Weighting, apply: Callable[[_Controlled], AbstractContextManager]) -> Any:
    """A clone with a weighting in force. An earlier one is replaced, so that twice equals once."""

    @contextmanager
    def sampling(run: Run) -> Iterator[None]:
        size = (run.noise.shape[-2] * PIXELS, run.noise.shape[-1] * PIXELS)
        for conds in run.guider.conds.values():
            for cond in conds:
                cond["model_conds"] = cond.get("model_conds", {}) | weighting.model_conds(cond, size)
        yield

    def forward(forward: Forward) -> AbstractContextManager:
        values, drop = (forward.conditions.pop(key, None) for key in (_VALUES, _DROP))
        return apply(_Controlled(weighting, forward, values, drop))

    clone = around_forwards(around_sampling(without(model, KEY), KEY, sampling), KEY, forward)
    clone.set_attachments(KEY, weighting)
    return clone


def _add_to_embedding(forward: Forward, added: torch.Tensor) -> None:
    """Add (B, D) to a UNet's timestep embedding, through ComfyUI's ``emb_patch``."""
    patches = dict(forward.options.get("patches", {}))
    patches["emb_patch"] = [*patches.get("emb_patch", []), lambda emb, channels, options: emb + added.to(emb)]
    forward.options["patches"] = patches


@contextmanager
def _hooked(forward: Forward, path: str, hook: Callable) -> Iterator[None]:
    """A hook on a layer that exists only inside one forward never meets another clone."""
    reached = Reached("control")
    reached.watch(forward.network)
    handle = hook_after(forward.network.get_submodule(path), reached.noting(path, hook))
    try:
        yield
    finally:
        reached.close()
        handle.remove()
    reached.check()


# --- weighting the size conditioning ------------------------------------------------------------------------------
def size_input(base: Any) -> SizeInput:
    """Where ComfyUI's BaseModel takes the picture's size."""
    record = record_of(base.diffusion_model)
    sizes = None if record is None or record[1].sizes is None else record[1].sizes(base)
    if sizes is None:
        shown = f"{type(base).__name__} ({type(base.diffusion_model).__name__})"
        accepted = [f"{f.name} with size conditions" for f in FAMILIES if f.comfyui is not None and f.comfyui.sizes]
        raise refuse("model", shown, accepted, "other models take no sizes to weight")
    return sizes


def reads_sizes(model: Any) -> None:
    """Refuse a MODEL that would ignore control values without a word."""
    weighting = weighting_of(model)
    if weighting is None or weighting.checkpoint is None:
        size_input(model.model)


def weighted(model: Any, gamma: GammaConfig, reference: Reference = "target") -> Any:
    """A clone whose size inputs weigh gamma of each row's timestep; the model itself where the weight is constant 1.

    Nothing is put on the modules between calls, and no weight changes. Applied twice, the last one counts.
    """
    vector, before = size_input(model.model).size is not None, weighting_of(model)
    if before is not None and before.checkpoint is not None:
        raise refuse(
            "model", "with a size-conditioning checkpoint", "one without", "its curve is part of what was trained"
        )
    clock_of(model.get_model_object("model_sampling"))  # refuses a model without timesteps now, not while it samples
    off = gamma.form == "constant" and reference == "target"  # any other reference changes rows without control
    if off:
        return model if before is None else without(model, KEY)
    return _applied(model, Weighting(gamma, reference), _weigh_in_vector if vector else _weigh_alone)


def _weigh_in_vector(controlled: _Controlled) -> AbstractContextManager:
    """(gamma - 1)(A(size) - A(ref)) through ComfyUI's ``emb_patch``, right before the UNet adds A(size)."""
    forward, weights = controlled.forward, controlled.weights
    base, device, y = forward.base, forward.x.device, forward.conditions.get("y")
    if y is None or bool((weights == 1).all()):
        return nullcontext()
    sizes = size_input(base)
    neutral = reference_input(y, sizes, controlled.weighting.reference)
    dtype = base.get_dtype_inference()
    full, neutral = (core.cast_to_device(v, device, dtype) for v in (y, neutral))
    ends = weights == 0
    # At weight 0 the neutral vector itself: a difference that cancels would leave a rounding.
    forward.conditions["y"] = torch.where(ends[:, None].to(device), neutral, full)
    weights = weights.masked_fill(ends, 1.0)
    if not bool((weights == 1).all()):
        delta = added_delta(forward.network.get_submodule(sizes.path), full, neutral)
        _add_to_embedding(forward, weighted_delta(delta, weights))
    return nullcontext()


def _weigh_alone(controlled: _Controlled) -> AbstractContextManager:
    """ComfyUI has no patch at an embedder of sizes alone: a hook blends its output with that of the neutral size."""
    weights, reference = controlled.weights, controlled.weighting.reference
    if bool((weights == 1).all()):
        return nullcontext()
    own = [side * PIXELS for side in controlled.forward.x.shape[-2:]]
    size = own if isinstance(reference, str) else list(reference)

    def hook(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if reference == "zeros":
            neutral = module.mlp(output.new_zeros(2, module.frequency_embedding_size)).reshape(1, -1)
        else:
            neutral = module.forward(torch.tensor([size]).to(args[0]), 1)
        return blend(output, neutral.expand_as(output), weights)

    return _hooked(controlled.forward, size_input(controlled.forward.base).path, hook)


# --- control checkpoints ------------------------------------------------------------------------------------------
def shipped_checkpoints() -> dict[str, Path]:
    """Name -> control file of each portraits transformer that ships."""
    return {f"portraits {p.parent.name}": p for p in sorted(TRANSFORMERS.glob("*/control.safetensors"))}


def checkpoints() -> list[str]:
    """Files of ``models/vitrine_control``, then those that ship."""
    return [*known_files(FOLDER), *shipped_checkpoints()]


def checkpoint_stamp(name: str) -> str:
    """What tells whether one of :func:`checkpoints` has changed."""
    shipped = shipped_checkpoints().get(name)
    return stamp_of(FOLDER, name) if shipped is None else stamp(shipped)


def read_checkpoint(name: str) -> ControlCheckpoint:
    """One of :func:`checkpoints`."""
    return load_control(shipped_checkpoints().get(name) or folder_paths.get_full_path_or_raise(FOLDER, name))


def with_checkpoint(model: Any, checkpoint: ControlCheckpoint) -> Any:
    """A clone to which a checkpoint's control embedding is added, Eq. 1, for conditionings that have control values."""
    facts = checkpoint.metadata
    facts.check(backbone_of(model))
    clock_of(model.get_model_object("model_sampling"))
    clone = _applied(model, Weighting(facts.gamma, checkpoint=checkpoint), _add_control)
    _patch_weights(clone, checkpoint.extra)
    return clone


def _patch_weights(clone: Any, extra: dict[str, torch.Tensor]) -> None:
    """Further weights of a checkpoint, as differences: LoRAs on the MODEL stay, the next checkpoint's replace these."""
    record = record_of(backbone_of(clone))
    unet = record is not None and record[0].component == "unet"
    names = core.unet_to_diffusers(clone.model.model_config.unet_config) if unet and extra else {}
    keys = {k: names.get(k.removeprefix("base.")) for k in extra}
    lost = [k for k, v in keys.items() if v is None]
    if lost:
        raise refuse("weights", lost[:3], "base.* of a UNet", "merge them into the base model first")
    originals, differences = checkpoint_weights(clone), {}
    for key, value in extra.items():
        name = str(keys[key])
        old = as_numbers(originals.get(name, backbone_of(clone).get_parameter(name))).float()
        differences[f"{PREFIX}{name}"] = value.to(old) - old
    put_weights(clone, KEY, differences)


def _add_control(controlled: _Controlled) -> AbstractContextManager:
    """The control embedding of Eq. 1, added to the timestep embedding."""
    weighting, forward, values, drop = controlled.weighting, controlled.forward, controlled.values, controlled.drop
    if values is None or drop is None or bool(drop.all()):
        return nullcontext()
    assert weighting.checkpoint is not None  # its own controls are what brings a MODEL here
    gamma, embedder = weighting.gamma, weighting.checkpoint.embedder.to(forward.x.device)
    added = embedder(values.cpu(), gamma.u(controlled.timesteps), gamma, drop[:, 0].cpu())
    hook = lambda module, args, output: output + added.to(output)  # noqa: E731
    paths = time_embedding(forward.network)[1].paths(forward.network)
    if not paths:
        _add_to_embedding(forward, added)
        return nullcontext()
    return _hooked(forward, paths[0], hook)
