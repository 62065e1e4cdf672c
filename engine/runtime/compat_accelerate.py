"""accelerate's hooks that offload weights, read from the modules that carry them; the library is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

HOOK = "_hf_hook"
"""Attribute of a module that holds accelerate's hook."""
REPLACED = (HOOK, "_old_forward", "forward")
"""Attributes that accelerate sets on a module."""


def has_hook(module: nn.Module) -> bool:
    """Whether accelerate has put its hook into a module."""
    return HOOK in vars(module)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module, those in a sequence one by one."""
    hook = vars(module).get(HOOK)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def device_of(hook: Any) -> torch.device | None:
    """The device on which a hook runs its module."""
    device = getattr(hook, "execution_device", None)
    return None if device is None else torch.device(device)


def takes_away(hook: Any) -> bool:
    """Whether a hook takes the weights away after its module's forward (sequential offloading)."""
    return bool(getattr(hook, "offload", False))


def offloads(hook: Any) -> bool:
    """Whether a hook stores the weights on another device between forwards."""
    return hasattr(hook, "prev_module_hook") or takes_away(hook)


def stored(hook: Any, name: str) -> torch.Tensor | None:
    """A parameter that a hook stores while the module has a placeholder."""
    weights = getattr(hook, "weights_map", None)
    return None if weights is None else weights[name]


def probe() -> list[str]:
    """Names that are missing from the installed accelerate; empty if it is not installed."""
    try:
        from accelerate import hooks
    except ImportError:
        return []
    kind = getattr(hooks, "AlignDevicesHook", None)
    return [f"AlignDevicesHook.{n}" for n in ("pre_forward", "post_forward") if not hasattr(kind, n)]
