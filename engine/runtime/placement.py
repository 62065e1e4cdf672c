"""Where a module computes, and in which precision: also while its weights are offloaded between forwards.

accelerate's hooks (``enable_model_cpu_offload``, ``enable_sequential_cpu_offload``) and diffusers' group offloading are
read from the modules that carry them; neither library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from . import compat_accelerate as accelerate
from . import compat_diffusers as diffusers
from .compat_torch import modules_in
from .stored_weights import is_packed, shape_of


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's forwards. Its weights may lie elsewhere until a forward fetches them."""
    tensor = next((t for tensors in (module.parameters(), module.buffers()) for t in tensors), None)
    if tensor is not None and tensor.device.type not in ("cpu", "meta"):
        return tensor.device  # what is offloaded rests on the CPU
    for child in modules_in(module):
        device = next(filter(None, map(accelerate.device_of, accelerate.hooks_of(child))), None)
        if device is not None:
            return device
        group = diffusers.group_hook(child)
        if group is not None:
            return diffusers.group_device(group)
    return torch.device("cpu") if tensor is None else tensor.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """The precision that a network takes its inputs in.

    diffusers' models know it, also where weights are stored in fewer bits or some layers are kept in float32; of other
    modules it is that of the first floating-point weight, float32 where that one is stored in 8 bits.
    """
    known = getattr(module, "dtype", None)
    if isinstance(known, torch.dtype) and known.is_floating_point:
        return _wide_enough(known)
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    return torch.float32 if weight is None else _wide_enough(weight.dtype)


def _wide_enough(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 1 else torch.float32


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """While the block is open, submodules may be called one by one, and a backward pass finds the weights it needs.

    Offloading may fetch the module whole, or take a group's weights away as soon as the group's forward has ended,
    when autograd still refers to them. Weights fetched by model offloading stay until the pipeline frees its models,
    as after a forward; those of offloaded groups stay for the block and go back at its end.
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
    """The VAE to call: in float32 where it holds float16 and its config says ``force_upcast`` (SDXL's overflows).

    The caller's own is cast for the block and gets its precision back, to the bit. Under group offloading it is left
    alone and a copy on its device runs, for the groups bring weights as they were stored, whatever was cast since.
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
    """A copy with all weights on the device of its forwards, and none of the hooks that offload the original's.

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
        # hooks hold all weights again, and forwards that they replaced are bound to the original
        made |= {id(value): value for name, value in vars(child).items() if name in _HOOKS and _hooked(child)}
    copy = deepcopy(module, made)
    for original, child in zip(module.modules(), copy.modules(), strict=True):
        if _hooked(original):
            for name in _HOOKS:
                vars(child).pop(name, None)
    return copy


_HOOKS = (*accelerate.REPLACED, *diffusers.REPLACED)
"""What accelerate and diffusers put into a module; without it, its class's own forward is back."""


def _hooked(module: nn.Module) -> bool:
    return accelerate.has_hook(module) or diffusers.has_hook(module)


def refuse_offloaded(module: nn.Module) -> None:
    """Training keeps what a forward fetched for its gradients: offloading would save nothing, and break most trainings.

    Raises:
        VitrineError: If the weights of the module, or of a part, are away between forwards, or stored in another
            precision than they compute in.
    """
    refuse_without_gradients(module)
    for child in modules_in(module):
        away = any(map(accelerate.offloads, accelerate.hooks_of(child)))
        if away or diffusers.group_hook(child) is not None:
            shown = f"{type(module).__name__} with its weights offloaded"
            raise refuse(
                "network", shown, "one to train that is whole on its device",
                "load the model again without offloading, and move it with .to(device)",
            )  # fmt: skip


def refuse_without_gradients(module: nn.Module) -> None:
    """Gradients need the weights of the forward, which layerwise casting has put back into storage by then.

    Layers that quantise their inputs too pass none on at all, others compute by a kernel that has no derivative: one
    quantised layer of each kind is asked, with one row of zeros.

    Raises:
        VitrineError: If ``enable_layerwise_casting`` is on in the module or a part, or a quantised layer has no
            gradient.
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
        kind = type(child), type(weight), getattr(child, "layout_type", None), getattr(weight, "quant_type", None)
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
        except RuntimeError:  # such as that a product with the transpose is not there
            return False


def put_back(module: nn.Module) -> None:
    """Take back what offloading fetched for a forward that was cut short: its own hooks do so at a forward's end."""
    for child in modules_in(module):
        for hook in accelerate.hooks_of(child):
            here = any(not p.is_meta for p in child.parameters(recurse=False))
            if here and accelerate.takes_away(hook):
                hook.post_forward(child, None)
    for group in diffusers.groups_of(module):
        diffusers.end_forward(group)


def weight_of(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """A parameter as it is stored, also where sequential offloading left a placeholder on the meta device."""
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight
    kept = (accelerate.stored(hook, name) for hook in accelerate.hooks_of(module))
    return next((tensor for tensor in kept if tensor is not None), weight)
