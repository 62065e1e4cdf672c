"""Applies a plan to a diffusers pipeline: within a block, or to a copy that shares the weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..diffusion.schedule import convention_of
from ..errors import VitrineError, refuse
from ..families import record_of, refuse_unfit, trained_size
from ..families.family import vae_factor
from ..runtime.compat_torch import set_child
from ..runtime.compiled import EagerRuns, eager_runs, uncompiled
from ..runtime.forward_hooks import hook_before
from .plan import ModelFacts, Plan, Positions, plan_transfer
from .posembed import recover_grid
from .receptive import Spread, inner_convolutions, is_convolutional
from .rotary_patch import RotaryPositions, is_rotary, rotary_part
from .schedulers import own_shift, transferred_scheduler
from .transfer_config import ResolutionTransferConfig
from .undoable import Undoable

_MOVED = "_resolution_moved"
_ANY = 128
"""Latent side that diffusers sets in pipelines of every transformer, whatever its training size."""


def backbone_of(pipe: Any) -> tuple[str, Any]:
    """(attribute, network) of a pipeline."""
    for name in ("unet", "transformer"):
        if getattr(pipe, name, None) is not None:
            return name, getattr(pipe, name)
    raise refuse("pipeline", type(pipe).__name__, "one with a unet or a transformer", "pass another pipeline")


def facts_of(pipe: Any, train_size: tuple[int, int] | None = None) -> ModelFacts:
    """Facts about a diffusers pipeline for :func:`plan_transfer`; ``train_size`` in pixels, if known."""
    backbone: Any = uncompiled(backbone_of(pipe)[1])
    factor = _factor(pipe)
    refuse_unfit(backbone, "size")
    path, part = position_part(backbone)
    rotary = is_rotary(part)
    patch = 2 if rotary else getattr(part, "patch_size", None) or backbone.config.get("patch_size") or 1
    size = train_size or _own_size(pipe, backbone, factor)
    schedule, _ = convention_of(pipe.scheduler, backbone)
    shift, dynamic = 1.0, None
    if schedule.kind == "flow" and size is not None:
        shift, dynamic = own_shift(pipe.scheduler, size[0] * size[1] // (factor * patch) ** 2)
    positions = _positions(backbone, part, size[1] // factor if size else 0)
    counts = "" if hasattr(pipe.scheduler, "sigmas") else type(pipe.scheduler).__name__
    return ModelFacts(
        type(backbone).__name__,
        schedule,
        size,
        factor,
        patch,
        shift,
        dynamic,
        positions,
        is_convolutional(backbone),
        counts,
    )


def position_part(backbone: nn.Module) -> tuple[str, Any]:
    """(path, module) that adds positions: diffusers' PatchEmbed or a rotary embedding; ("", None) without one."""
    for path, module in backbone.named_modules():
        if hasattr(module, "cropped_pos_embed") and getattr(module, "pos_embed", None) is not None:
            return path, module
    return rotary_part(backbone)


def _factor(pipe: Any) -> int:
    if getattr(pipe, "vae_scale_factor", None):
        return int(pipe.vae_scale_factor)
    vae = getattr(pipe, "vae", None)
    return vae_factor(vae) if vae is not None else 8


def _own_size(pipe: Any, backbone: Any, factor: int) -> tuple[int, int] | None:
    """The training size from the network's config, else the pipeline's, else the family's."""
    side, own = backbone.config.get("sample_size"), getattr(pipe, "default_sample_size", None)
    if side is None and own in (None, _ANY) and (family := trained_size(backbone)):
        return family
    side = side or own
    if side is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side
    return width * factor, height * factor


def _positions(backbone: Any, part: Any, latents: int) -> Positions:
    if part is None:
        return Positions("none" if is_convolutional(backbone) else "unknown")
    if is_rotary(part):
        return Positions("rope")
    if not part.pos_embed_max_size:
        return Positions("sincos", part.base_size, _scale(backbone, part, latents))
    try:
        grid = recover_grid(part.pos_embed)
    except VitrineError:
        return Positions("learned", size=part.pos_embed_max_size, table=part.pos_embed)
    return Positions("stored", size=part.pos_embed_max_size, table=part.pos_embed, grid=grid)


def _scale(backbone: Any, part: Any, latents: int) -> float:
    """``interpolation_scale`` at the training size."""
    record = record_of(backbone)
    derived = None if record is None else record[0].grid_scale
    if derived is None or part.base_size == latents // part.patch_size:
        return float(part.interpolation_scale)
    return derived(backbone, latents)


# --- applying -----------------------------------------------------------------------------------------------------
class Applied(Undoable):
    """An open transfer, made by :func:`apply`. Leaving the block restores the same objects.

    Attributes:
        plan: the decisions, with a summary.
    """

    def __init__(self, pipe: Any, plan: Plan, facts: ModelFacts) -> None:
        super().__init__()
        self.plan = plan
        self._eager_runs: list[EagerRuns] = []
        self._changes: list[Spread | RotaryPositions] = []
        scheduler = transferred_scheduler(pipe.scheduler, facts, plan)
        try:
            if scheduler is not pipe.scheduler or plan.positions != "keep" or plan.step != (1, 1):
                self._mark(pipe)
                self._at_its_size(uncompiled(backbone_of(pipe)[1]), facts)
            if scheduler is not pipe.scheduler:
                self._swap(pipe, "scheduler", scheduler)
            network = backbone_of(pipe)[1]
            backbone = uncompiled(network)
            if plan.step != (1, 1) or plan.positions != "keep":
                self._eager_runs += eager_runs(network)  # compiled code would ignore new positions
            if plan.step != (1, 1):
                self._keep(Spread(backbone, plan.step))
            if plan.positions != "keep":
                if facts.positions.kind == "rope":
                    self._keep(RotaryPositions(backbone, plan))
                else:
                    self._table(position_part(backbone)[1], facts.positions)
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        for change in self._changes:
            change.reached.check()

    def _keep(self, change: Spread | RotaryPositions) -> None:
        self._changes.append(change)
        self._undo.append(change.close)

    def close(self) -> None:
        """Restore everything; idempotent."""
        super().close()
        self._allow_compiled()

    def leave(self) -> None:
        """Keep the transfer permanently: allow compiled code again, and stop checking."""
        for change in self._changes:
            change.reached.close()
        self._allow_compiled()

    def _allow_compiled(self) -> None:
        while self._eager_runs:
            self._eager_runs.pop().remove()

    def _mark(self, pipe: Any) -> None:
        """Marks the pipeline for :func:`refuse_moved`, without ``setattr``, which diffusers overrides."""
        vars(pipe)[_MOVED] = True
        self._undo.append(lambda: vars(pipe).__delitem__(_MOVED))

    def _table(self, part: Any, positions: Positions) -> None:
        """Sets a table for exactly this size; PatchEmbed uses all of it if height, width and crop match."""
        old = part.pos_embed
        table = self.plan.table(positions, old.shape[-1])
        table = table.to(old.device, torch.float32 if positions.kind == "sincos" else old.dtype)
        self._swap(part, "pos_embed", table)
        for name, value in zip(("height", "width"), self.plan.target, strict=True):
            self._swap(part, name, value)
        self._swap(part, "pos_embed_max_size", None)

        def fetch(part: Any, inputs: tuple) -> None:
            part.pos_embed = part.pos_embed.to(inputs[0].device)  # offloading fetches only tensors that it registered

        self._undo.append(hook_before(part, fetch, any_thread=True).remove)

    def _at_its_size(self, backbone: nn.Module, facts: ModelFacts) -> None:
        """Refuses latents of another size than the plan's, where levels, positions and convolutions are wrong."""
        (width, height), step = self.plan.config.target_size, facts.factor * facts.patch
        known: list[Any] = [None, ()]  # positions that were read, which all steps of a run share, and their size

        def check(net: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            positions = kwargs.get("img_ids")
            if positions is None or positions is not known[0]:
                known[:] = positions, _size_of(args, kwargs, facts)
            size = known[1]
            if size not in ((width, height), (width * height // step**2,)):
                shown = f"{size[0]} x {size[1]}" if len(size) == 2 else f"{size[0]} tokens"
                remedy = "sample other sizes with the pipeline as it was loaded"
                raise refuse("latent size", shown, f"{width} x {height}, the plan's", remedy)

        self._undo.append(hook_before(backbone, check, with_kwargs=True, any_thread=True).remove)


def _size_of(args: tuple, kwargs: dict[str, Any], facts: ModelFacts) -> tuple[int, ...]:
    """(width, height) in pixels of what a forward denoises, or (tokens,) where it is a sequence without positions."""
    names = ("sample", "hidden_states", "x")
    sample = args[0] if args else next(kwargs[name] for name in names if name in kwargs)
    sample, step = sample[0] if isinstance(sample, list) else sample, facts.factor * facts.patch
    if sample.ndim > 3:
        return sample.shape[-1] * facts.factor, sample.shape[-2] * facts.factor
    if kwargs.get("img_shapes"):  # Qwen-Image: (frames, height, width) in tokens of each picture, references behind
        _, height, width = kwargs["img_shapes"][0][0]
    elif isinstance(ids := kwargs.get("img_ids"), torch.Tensor):  # Flux: the first column numbers the picture
        own = ids.reshape(-1, ids.shape[-1])
        height, width = (int(side) + 1 for side in own[own[:, 0] == 0][:, 1:3].amax(0))
    else:
        return (sample.shape[1],)
    return width * step, height * step


def refuse_moved(pipe: Any) -> None:
    """Raises for a pipeline inside :func:`apply` or from :func:`transferred_copy`."""
    if vars(pipe).get(_MOVED):
        remedy = "take the pipeline from before the first transfer"
        raise refuse("pipeline", "one that is moved to another size already", "a pipeline as it was loaded", remedy)


def apply(pipe: Any, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None) -> Applied:
    """Applies a transfer inside ``with apply(pipe, config) as applied:``, to sample at ``config.target_size``.

    Inside, the pipeline has another scheduler and other position tables; weights are never modified. At r = 1 nothing
    is changed. ``applied.plan.summary`` describes the decisions.
    """
    refuse_moved(pipe)
    facts = facts_of(pipe, config.train_size)
    return Applied(pipe, plan_transfer(facts, config, metadata), facts)


def transferred_copy(
    pipe: Any, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None
) -> tuple[Any, Plan]:
    """(a pipeline with a permanent transfer, its plan). It shares all weights with ``pipe``, which is unchanged."""
    name, network = backbone_of(pipe)
    new, backbone = copy.copy(pipe), uncompiled(network)
    paths = [position_part(backbone)[0]]
    if config.receptive_field != "none" and is_convolutional(backbone):
        paths += inner_convolutions(backbone)
    setattr(new, name, _branch(backbone, [path for path in paths if path]))
    applied = apply(new, config, metadata)
    applied.leave()  # a copied module has no compiled code
    return new, applied.plan


def _branch(module: nn.Module, paths: list[str]) -> nn.Module:
    """A copy of ``module`` and of the modules on ``paths``; all tensors and other modules are shared."""
    if "forward" in vars(module):  # bound to the original module, so the copy would run with the old positions
        remedy = "make the copy first, then offload or compile, or work inside `with apply(...)`"
        raise refuse("network", f"a {type(module).__name__} with its forward replaced", "one as it was loaded", remedy)
    new = copy.copy(module)
    for key, value in vars(module).items():
        if type(value) in (dict, OrderedDict):  # a module's dictionaries of children and hooks; not its frozen config
            new.__dict__[key] = value.copy()
    tails: dict[str, list[str]] = {}
    for path in paths:
        head, _, tail = path.partition(".")
        tails.setdefault(head, []).extend([tail] if tail else [])
    for head, below in tails.items():
        set_child(new, head, _branch(module.get_submodule(head), below))
    return new
