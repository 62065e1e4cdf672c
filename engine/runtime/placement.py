"""Device and precision of a module's forwards, also while its weights are offloaded.

accelerate's hooks (``enable_model_cpu_offload``, ``enable_sequential_cpu_offload``) and diffusers' group offloading are
read from the modules that have them; neither library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from . import compat_accelerate as accelerate
from . import compat_diffusers as diffusers
from .compat_torch import modules_in, replaces_forward_below, uncompiled
from .stored_weights import is_packed, shape_of

HOOKED = (accelerate.HOOK, diffusers.HOOK)
"""Attributes by which a module shows a hook of accelerate or of diffusers."""


def placement_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """:func:`device_of` and :func:`dtype_of` of a network before a forward.

    Where no module is hooked, one walk answers both. Nothing is remembered, so hooks that are added between two
    forwards are seen, on inner modules too.
    """
    plain = uncompiled(module)
    kept = getattr(type(plain), "_keep_in_fp32_modules", ())  # () for other modules than models
    tensor = next((t for tensors in (module.parameters(), module.buffers()) for t in tensors), None)
    if tensor is None or kept == () or replaces_forward_below(plain, HOOKED):
        return device_of(module), dtype_of(module)
    known = _first_weight_dtype(plain, kept or ())
    return tensor.device, dtype_of(module) if known is None else _wide_enough(known)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's forwards. Its weights may be on another device between forwards."""
    tensor = next((t for tensors in (module.parameters(), module.buffers()) for t in tensors), None)
    if tensor is not None and tensor.device.type not in ("cpu", "meta"):
        return tensor.device  # offloaded weights are on the CPU
    for child in filter(_hooked, modules_in(module)):
        device = next(filter(None, map(accelerate.device_of, accelerate.hooks_of(child))), None)
        if device is not None:
            return device
        group = diffusers.group_hook(child)
        if group is not None:
            return diffusers.group_device(group)
    return torch.device("cpu") if tensor is None else tensor.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a network's inputs.

    diffusers' models store it, also if weights have fewer bits or some layers stay in float32. For other modules it is
    the dtype of the first floating-point weight, or float32 if that is stored in 8 bits.
    """
    known = _first_dtype(module) or getattr(module, "dtype", None)
    if isinstance(known, torch.dtype) and known.is_floating_point:
        return _wide_enough(known)
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    return torch.float32 if weight is None else _wide_enough(weight.dtype)


def _first_dtype(module: nn.Module) -> torch.dtype | None:
    """What diffusers' ``model.dtype`` finds where nothing is hooked, without its walk through all modules."""
    module = uncompiled(module)
    kept = getattr(type(module), "_keep_in_fp32_modules", ())  # () for other modules than models
    if kept == () or replaces_forward_below(module, HOOKED):
        return None
    return _first_weight_dtype(module, kept or ())


def _first_weight_dtype(module: nn.Module, kept: Iterable[str]) -> torch.dtype | None:
    """Of the first floating-point weight; ``kept``: parts of names of layers that stay in float32."""
    weights = ((name, p) for name, p in module.named_parameters() if p.is_floating_point())
    return next((p.dtype for name, p in weights if not any(part in name for part in kept)), None)


def _wide_enough(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 1 else torch.float32


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """Keeps weights onloaded while the block is open, for calls of single submodules and backward passes.

    Offloading may fetch the module whole, or offload a group as soon as the group's forward has ended, when autograd
    still refers to its weights. Weights fetched by model offloading stay until the pipeline frees its models, as after
    a forward; offloaded groups return at the end of the block.
    """
    for hook in accelerate.hooks_of(module):
        hook.pre_forward(module)
    groups = diffusers.groups_of(module)
    try:
        for group in groups:
            diffusers.fetch(group)
        yield
    finally:
        for group in groups:
            diffusers.give_back(group)


@contextmanager
def upcast_vae(vae: Any) -> Iterator[Any]:
    """The VAE to call: in float32 if it is float16 and its config has ``force_upcast`` (SDXL's overflows).

    The caller's VAE is cast for the block and restored exactly. Under group offloading, which brings weights in their
    stored dtype, a copy on the device runs instead.
    """
    if vae.dtype != torch.float16 or not getattr(vae.config, "force_upcast", False):
        yield vae
    elif diffusers.groups_of(vae):
        yield copied(vae, torch.float32).requires_grad_(False)
    else:
        try:
            yield vae.to(torch.float32)
        finally:
            vae.to(torch.float16)


def copied(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy with all weights on the device of its forwards, without the hooks that offload the original.

    Args:
        dtype: of the copy's floating-point weights, by default those of the original.
    """
    device, made = device_of(module), dict[int, Any]()

    def fetched(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=True)

    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            made[id(parameter)] = nn.Parameter(fetched(weight_of(child, name)), parameter.requires_grad)
        for name, buffer in child.named_buffers(recurse=False):
            made[id(buffer)] = fetched(weight_of(child, name))
        # hooks refer to all weights, and forwards that they replaced are bound to the original
        made |= {id(value): value for name, value in vars(child).items() if name in _HOOKS and _hooked(child)}
    copy = deepcopy(module, made)
    for original, child in zip(module.modules(), copy.modules(), strict=True):
        if _hooked(original):
            for name in _HOOKS:
                vars(child).pop(name, None)
    return copy


_HOOKS = (*accelerate.REPLACED, *diffusers.REPLACED)
"""Attributes that accelerate and diffusers set; deleting them restores the class's forward."""


def _hooked(module: nn.Module) -> bool:
    return accelerate.has_hook(module) or diffusers.has_hook(module)


def refuse_offloaded(module: nn.Module) -> None:
    """Raises if weights are offloaded: autograd would keep the onloaded copies."""
    refuse_without_gradients(module)
    for child in modules_in(module):
        away = any(map(accelerate.offloads, accelerate.hooks_of(child)))
        if away or diffusers.group_hook(child) is not None:
            shown = f"{type(module).__name__} with its weights offloaded"
            raise refuse(
                "network",
                shown,
                "a network whose weights stay on its device",
                "load the model again without offloading, and move it with .to(device)",
            )


def refuse_without_gradients(module: nn.Module) -> None:
    """Raises if a backward pass could not use the forward's weights, as with layerwise casting.

    Layers that also quantise their inputs may have no gradient, and some kernels have no derivative: one quantised
    layer of each kind is probed with one row of zeros.
    """
    if any(map(diffusers.is_cast, modules_in(module))):
        shown = f"{type(module).__name__} with layerwise casting"
        accepted, remedy = "weights in the precision they compute in", "load the model again, in bfloat16 for one"
        raise refuse("network", shown, accepted, f"{remedy}, without enable_layerwise_casting")
    asked: set[tuple[object, ...]] = set()
    for path, child in module.named_modules():
        shape, weight = shape_of(child), getattr(child, "weight", None)
        if shape is None or weight is None or not is_packed(weight):
            continue
        kind = type(child), type(weight), getattr(child, "layout_type", None), _format(weight)
        if kind not in asked and not _passes_gradients(child, shape[1], weight.device, dtype_of(module)):
            shown = f"{type(weight).__name__} in {path}, through which no gradient passes"
            raise refuse("network", shown, "weights alone quantised", "load the model again, in bfloat16 for one")
        asked.add(kind)


def _passes_gradients(layer: nn.Module, width: int, device: torch.device, dtype: torch.dtype) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        row = torch.zeros(1, width, device=device, dtype=dtype, requires_grad=True)
        try:
            output = layer(row)
            return output.requires_grad and torch.autograd.grad(output.sum(), row)[0] is not None
        except (RuntimeError, TypeError):  # no product with the transpose; a class that cannot be made anew
            return False


def _format(weight: torch.Tensor) -> object:
    return getattr(weight, "quant_type", None) or getattr(weight, "tensor_type", None)


def put_back(module: nn.Module) -> None:
    """Offload what was fetched for an early-exited forward, whose own hooks would do so only at its end."""
    for child in modules_in(module):
        for hook in accelerate.hooks_of(child):
            here = any(not p.is_meta for p in child.parameters(recurse=False))
            if here and accelerate.takes_away(hook):
                hook.post_forward(child, None)
    for group in diffusers.groups_of(module):
        diffusers.end_forward(group)


def weight_of(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """A parameter's stored value, also if sequential offloading left a placeholder on the meta device."""
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight
    kept = (accelerate.stored(hook, name) for hook in accelerate.hooks_of(module))
    return next((tensor for tensor in kept if tensor is not None), weight)
