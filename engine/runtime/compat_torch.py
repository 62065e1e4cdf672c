"""Private names of PyTorch, used only here. Tested from 2.6 to the newest version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from ..errors import refuse

HOOKS = {"_forward_pre_hooks": "hook before", "_forward_hooks": "hook after", "_backward_hooks": "hook on gradients"}
"""Hook dictionaries of a module -> what to call their entries."""

PADDED_SIDES = "_reversed_padding_repeated_twice"
"""Attribute of a convolution: cells to pad left, right, above, below, for modes other than zeros."""


def probe() -> list[str]:
    """Names that are missing from this PyTorch."""
    module, tensor = nn.Module(), torch.zeros(1)
    own = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", *HOOKS)
    lost = [f"torch.nn.Module.{name}" for name in own if not hasattr(module, name)]
    lost += [f"torch.Tensor.{name}" for name in ("_base", "_version") if not hasattr(tensor, name)]
    lost += ["torch.UntypedStorage._cdata"] * (not hasattr(tensor.untyped_storage(), "_cdata"))
    return lost + [f"torch.nn.Conv2d.{PADDED_SIDES}"] * (not hasattr(nn.Conv2d(1, 1, 1, device="meta"), PADDED_SIDES))


# --- modules ------------------------------------------------------------------------------------------------------
def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(kind, hook) of a module's hooks, without its children's."""
    for table, kind in HOOKS.items():
        yield from ((kind, hook) for hook in getattr(module, table, {}).values())


def move_hooks_last(module: nn.Module, attribute: str) -> None:
    """Reorder forward hooks so that those with an attribute run last."""
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for number, hook in list(table.items()):
            if getattr(hook, attribute, False):
                table[number] = table.pop(number)


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's buffers that are in its state dict, without its children's."""
    return {k: v for k, v in module.named_buffers(recurse=False) if k not in module._non_persistent_buffers_set}


def parameters_and_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(dictionary, name, tensor) of a module without its children; writing to the dictionary replaces the tensor."""
    for table in (module._parameters, module._buffers):
        yield from ((table, name, value) for name, value in list(table.items()) if value is not None)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own children by name, None where one was taken out."""
    return module._modules


def modules_in(network: nn.Module) -> Iterator[nn.Module]:
    """``network.modules()`` in the same order at a tenth of its cost: the network and all below, each once."""
    seen, stack = set[nn.Module](), [network]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield module
            stack.extend(child for child in reversed(children_of(module).values()) if child is not None)


def replaces_forward_below(network: nn.Module, names: tuple[str, str]) -> bool:
    """Whether the network or a module below has a forward of its own and with it an attribute of one of two names.

    A plain loop, for use before each forward: libraries' hooks come with such a forward, so that one look tells of
    nearly all modules that there is none.
    """
    first, second = names
    modules: list[nn.Module | None] = [network]
    for module in modules:  # which grows meanwhile
        if module is None:  # a layer that was taken out
            continue
        own = module.__dict__
        if "forward" in own and (first in own or second in own):
            return True
        children = own["_modules"]
        if children:
            modules += children.values()
    return False


def module_at(network: nn.Module, path: str) -> nn.Module:
    """``network.get_submodule(path)`` at a twentieth of its cost: a submodule by its path, itself for an empty one.

    Raises:
        AttributeError: There is none.
    """
    module: nn.Module | None = network
    for name in path.split(".") if path else ():
        module = None if module is None else children_of(module).get(name)
    return network.get_submodule(path) if module is None else module


def set_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Replace a child module without the checks of ``setattr``."""
    module._modules[name] = child


# --- tensors ------------------------------------------------------------------------------------------------------
def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a view of; itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same number for the same storage, also where it has no memory (meta, fake tensors)."""
    return int(storage._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes with every write to the tensor; -1 for tensors of inference mode."""
    return -1 if tensor.is_inference() else int(tensor._version)


# --- compiled code ------------------------------------------------------------------------------------------------
def uncompiled(module: nn.Module) -> nn.Module:
    """The network inside ``torch.compile(network)``; any other module as it is."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: nn.Module) -> bool:
    """Whether forwards of it, or of a part, run compiled code."""
    if hasattr(module, "_orig_mod"):
        return True
    return any(
        getattr(child, "_compiled_call_impl", None) is not None
        or hasattr(vars(child).get("forward"), "_torchdynamo_orig_callable")
        for child in modules_in(module)
    )


def has_compiled() -> bool:
    """Whether this process may have compiled code."""
    return "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")


def force_eager() -> Any:
    """Runs compiled code as plain Python until the returned context manager exits."""
    if not hasattr(torch.compiler, "set_stance"):
        shown = f"a compiled network under PyTorch {torch.__version__}"
        raise refuse("network", shown, "PyTorch 2.6 or newer", "upgrade, or load the network without torch.compile")
    return torch.compiler.set_stance("force_eager")
