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
from .stored_weights import is_packed, shape_of


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's forwards. Its weights may lie elsewhere until a forward fetches them."""
    tensor = next((t for tensors in (module.parameters(), module.buffers()) for t in tensors), None)
    if tensor is not None and tensor.device.type not in ("cpu", "meta"):
        return tensor.device  # what is offloaded rests on the CPU
    for child in module.modules():
        for hook in _offloading(child):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
        group = _group_hook(child)
        if group is not None:
            return torch.device(group.config.onload_device)
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
    for hook in _offloading(module):
        hook.pre_forward(module)
    groups = {id(h.group): h.group for h in map(_group_hook, module.modules()) if h is not None}
    try:
        for group in groups.values():
            group.onload_()
            group.onload_ = group.offload_ = lambda: None
        yield
    finally:
        for group in groups.values():
            vars(group).pop("onload_", None)
            vars(group).pop("offload_", None)
            group.offload_()


@contextmanager
def upcast_vae(vae: Any) -> Iterator[Any]:
    """The VAE to call: in float32 where it holds float16 and its config says ``force_upcast`` (SDXL's overflows).

    The caller's own is cast for the block and gets its precision back, to the bit. Under group offloading it is left
    alone and a copy on its device runs, for the groups bring weights as they were stored, whatever was cast since.
    """
    if vae.dtype != torch.float16 or not getattr(vae.config, "force_upcast", False):
        yield vae
    elif any(_group_hook(child) is not None for child in vae.modules()):
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


_HOOKS = ("_hf_hook", "_diffusers_hook", "_old_forward", "forward")
"""What accelerate and diffusers put into a module; without it, its class's own forward is back."""


def _hooked(module: nn.Module) -> bool:
    return "_hf_hook" in vars(module) or "_diffusers_hook" in vars(module)


def refuse_offloaded(module: nn.Module) -> None:
    """Training keeps what a forward fetched for its gradients: offloading would save nothing, and break most trainings.

    Raises:
        VitrineError: If the weights of the module, or of a part, are away between forwards, or stored in another
            precision than they compute in.
    """
    refuse_without_gradients(module)
    for child in module.modules():
        away = any(hasattr(hook, "prev_module_hook") or getattr(hook, "offload", False) for hook in _offloading(child))
        if away or _group_hook(child) is not None:
            shown = f"{type(module).__name__} with its weights offloaded"
            raise refuse(
                "network", shown, "one to train that is whole on its device",
                "load the model again without offloading, and move it with .to(device)",
            )  # fmt: skip


def refuse_without_gradients(module: nn.Module) -> None:
    """Gradients need the weights of the forward, which layerwise casting has put back into storage by then.

    Layers that quantise their inputs too pass none on at all: each quantised layer is asked, with one row of zeros.

    Raises:
        VitrineError: If ``enable_layerwise_casting`` is on in the module or a part, or a quantised layer has no
            gradient.
    """
    if any(_hook(child, "layerwise_casting") is not None for child in module.modules()):
        shown = f"{type(module).__name__} with layerwise casting"
        accepted, remedy = "weights in the precision they compute in", "load the model again, in bfloat16 for one"
        raise refuse("network", shown, accepted, f"{remedy}, without enable_layerwise_casting")
    for path, child in module.named_modules():
        shape, weight = shape_of(child), getattr(child, "weight", None)
        if shape is None or weight is None or not is_packed(weight):
            continue
        with torch.enable_grad():
            row = torch.zeros(1, shape[1], device=weight.device, dtype=dtype_of(module), requires_grad=True)
            if not child(row).requires_grad:
                shown = f"{type(weight).__name__} in {path}, through which no gradient passes"
                raise refuse("network", shown, "weights alone quantised", "load the model again, in bfloat16 for one")


def put_back(module: nn.Module) -> None:
    """Take back what offloading fetched for a forward that was cut short: its own hooks do so at a forward's end."""
    for child in module.modules():
        for hook in _offloading(child):
            here = any(p is not None and not p.is_meta for p in vars(child)["_parameters"].values())
            if here and getattr(hook, "offload", False):
                hook.post_forward(child, None)
    for group in {id(h.group): h.group for h in map(_group_hook, module.modules()) if h is not None}.values():
        group.offload_()


def weight_of(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """A parameter as it is stored, also where sequential offloading left a placeholder on the meta device."""
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight
    for hook in _offloading(module):
        if getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name]
    return weight


def _offloading(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module, those in a sequence one by one."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def _group_hook(module: nn.Module) -> Any:
    return _hook(module, "group_offloading")


def _hook(module: nn.Module, name: str) -> Any:
    """diffusers' own hook of a name, or None."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)
