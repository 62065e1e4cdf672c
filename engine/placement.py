"""Where a module computes, and in which precision: also while its weights are offloaded between forwards.

accelerate's hooks (``enable_model_cpu_offload``, ``enable_sequential_cpu_offload``) and diffusers' group offloading are
read from the modules that carry them; neither library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
        yield _copied(vae, torch.float32)
    else:
        try:
            yield vae.to(torch.float32)
        finally:
            vae.to(torch.float16)


def _copied(model: Any, dtype: torch.dtype) -> Any:
    """A diffusers model without its hooks, on the device of its forwards: 335 MB of float32 for SDXL's VAE."""
    with torch.device("meta"):
        copy = type(model).from_config(model.config)
    device = device_of(model)
    copy.load_state_dict({k: v.to(device, dtype) for k, v in model.state_dict().items()}, assign=True)
    for name in ("use_slicing", "use_tiling"):
        if hasattr(model, name):
            setattr(copy, name, getattr(model, name))
    return copy.requires_grad_(False).eval()


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
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook("group_offloading")
