"""Private names of diffusers, used only here: hooks of its modules, and parts of its pipelines. It is not imported."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from .compat_torch import modules_in

HOOK = "_diffusers_hook"
"""Attribute of a module that holds diffusers' hooks."""
REPLACED = (HOOK,)
"""Attributes that diffusers sets on a module."""


def has_hook(module: nn.Module) -> bool:
    """Whether diffusers has put its hooks into a module."""
    return HOOK in vars(module)


def hook_of(module: nn.Module, name: str) -> Any:
    """The diffusers hook of that name on a module, or None."""
    registry = vars(module).get(HOOK)
    return None if registry is None else registry.get_hook(name)


def group_hook(module: nn.Module) -> Any:
    """The hook of group offloading, or None."""
    return hook_of(module, "group_offloading")


def is_fused(module: nn.Module) -> bool:
    """Whether a fused query, key and value projection is called instead of the three.

    UNets unfuse by their processors and leave the mark; newer networks take the mark away.
    """
    if not vars(module).get("fused_projections", False):
        return False
    processor = type(vars(module).get("processor")).__name__
    return processor.startswith("Fused") or hasattr(type(module), "unfuse_projections")


def is_cast(module: nn.Module) -> bool:
    """Whether layerwise casting is on."""
    return hook_of(module, "layerwise_casting") is not None


def group_device(hook: Any) -> torch.device:
    """The device on which an offloaded group computes."""
    return torch.device(hook.config.onload_device)


def groups_of(module: nn.Module) -> list[Any]:
    """The offloaded groups in a network, each once."""
    return list({id(h.group): h.group for h in map(group_hook, modules_in(module)) if h is not None}.values())


def fetch(group: Any) -> None:
    """Onload a group's weights and keep them on the device until :func:`give_back`."""
    group.onload_()
    group.onload_ = group.offload_ = lambda: None


def give_back(group: Any) -> None:
    """Offload the weights that :func:`fetch` brought."""
    vars(group).pop("onload_", None)
    vars(group).pop("offload_", None)
    group.offload_()


def end_forward(group: Any) -> None:
    """Offload a group as at the end of its forward, unless :func:`fetch` keeps it."""
    group.offload_()


# --- pipelines ----------------------------------------------------------------------------------------------------
def execution_device(pipe: Any) -> torch.device:
    """Where a pipeline computes, its modules offloaded or not."""
    device: torch.device = pipe._execution_device
    return device


def loaded_from(config: Any) -> str:
    """The folder or hub id in the configuration of a pipeline or network; empty for one that was built."""
    return str(config.get("_name_or_path") or "")


def run_length(pipe: Any) -> int | None:
    """Number of timesteps of a pipeline's last run, None where it does not say."""
    return getattr(pipe, "_num_timesteps", None) or None


def modules_of_class(kind: Any) -> set[str]:
    """Names of the modules that a pipeline class is made from."""
    return set(kind._get_signature_keys(kind)[0])


def probe() -> list[str]:
    """Names that are missing from the installed diffusers; empty if it is not installed."""
    try:
        from diffusers.hooks import HookRegistry
        from diffusers.hooks.group_offloading import ModuleGroup
    except ImportError as error:
        return [] if error.name == "diffusers" else [f"diffusers: {error}"]
    lost = [f"HookRegistry.{n}" for n in ("get_hook",) if not hasattr(HookRegistry, n)]
    lost += [f"ModuleGroup.{n}" for n in ("onload_", "offload_") if not hasattr(ModuleGroup, n)]
    base = getattr(sys.modules.get("diffusers.pipelines.pipeline_utils"), "DiffusionPipeline", None)
    used = ("_execution_device", "_get_signature_keys")
    return lost + [f"DiffusionPipeline.{n}" for n in used if base is not None and not hasattr(base, n)]
