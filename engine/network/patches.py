"""Lists the LoRAs, hooks and patches applied to a model.

A diffusers pipeline has five mechanisms for such changes: PEFT layers, torch hooks, replaced attention processors,
replaced ``forward`` methods, and attributes of blocks (FreeU). :func:`active_patches` reads them all without changing
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import refuse
from ..runtime.compat_torch import hooks_of

CHANGED_ATTENTION = ("PAG", "IPAdapter", "CustomDiffusion")
"""Prefixes of diffusers' processors that change what attention computes; the others only choose a kernel."""


@dataclass(frozen=True)
class ActivePatch:
    """One kind of change: what it is, where it acts, on how many layers, and which code defines it."""

    kind: str
    where: str
    count: int
    owner: str


def as_text(patches: Iterable[ActivePatch], model: str = "model") -> str:
    """One line per patch, or a sentence if there are none."""
    lines = [f"{p.kind}: {p.where}  x{p.count}  [{p.owner}]" for p in patches]
    return "\n".join(lines) or f"nothing: this {model} is its checkpoint, unchanged"


def active_patches(model: Any) -> list[ActivePatch]:
    """Every patch that a forward of this pipeline or network applies. Nothing is loaded, moved or called.

    Args:
        model: a diffusers pipeline, all of whose networks are read, or one ``nn.Module``.

    Returns:
        One entry per kind and component, with the number of layers. Merged adapters are listed; weights that other code
        overwrote in place cannot be distinguished from a checkpoint's and are not.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, network in _networks(model):
        component = f"{name}: " if name else ""
        for module in network.modules():
            for kind, where, owner in (*_adapters(module), *_hooks(module), *_replaced(module)):
                counts[kind, component + where, owner] += 1
    return [ActivePatch(kind, where, count, owner) for (kind, where, owner), count in counts.items()]


def _networks(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield "", model
    elif isinstance(getattr(model, "components", None), dict):
        yield from ((k, v) for k, v in model.components.items() if isinstance(v, nn.Module))
    else:
        raise refuse("model", type(model).__name__, "a diffusers pipeline or an nn.Module", "pass the pipeline itself")


def _adapters(module: Any) -> Iterator[tuple[str, str, str]]:
    """The adapters that a PEFT layer applies, at the user's scale, without alpha / rank."""
    if not hasattr(module, "base_layer") or not hasattr(module, "active_adapters"):
        return
    merged = set(module.merged_adapters)
    if not module.disable_adapters:
        for name in module.active_adapters:
            if name in module.scaling and name not in merged:
                built_in = getattr(module, "lora_alpha", {}).get(name, 1) / getattr(module, "r", {}).get(name, 1)
                yield "adapter", f"{name} at scale {module.scaling[name] / built_in:g}", _owner(module)
    for name in sorted(merged):
        yield "adapter", f"{name} merged into the weights", _owner(module)


def _hooks(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    for kind, hook in hooks_of(module):
        yield kind, type(module).__name__, _owner(hook)
    for name, parametrizations in getattr(module, "parametrizations", {}).items():
        yield "parametrization", f"{name} of {type(module).__name__}", _owner(parametrizations[0])


def _replaced(module: Any) -> Iterator[tuple[str, str, str]]:
    if "forward" in vars(module):
        yield "replaced forward", type(module).__name__, _owner(module.forward)
    processor = getattr(module, "processor", None)
    kind = type(processor)
    if processor is not None and (
        not kind.__module__.startswith("diffusers.") or kind.__name__.startswith(CHANGED_ATTENTION)
    ):
        yield "attention processor", kind.__name__, _owner(processor)
    factors = {name: getattr(module, name, None) for name in ("s1", "s2", "b1", "b2")}
    if all(isinstance(f, (int, float)) for f in factors.values()):
        settings = " ".join(f"{name} {value:g}" for name, value in factors.items())
        yield "FreeU", f"{settings} in {type(module).__name__}", type(module).__module__


def _owner(thing: Any) -> str:
    """The name of the module that defines it."""
    return getattr(thing, "__module__", None) or type(thing).__module__
