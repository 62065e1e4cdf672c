"""The model families, one file each. A module of this package with a ``FAMILY`` is registered as one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import VitrineError, refuse
from ..network.condition import Condition
from ..network.site import Site
from ..network.structure import once
from ..runtime.compiled import uncompiled
from ..runtime.placement import placement_of
from ..runtime.stored_weights import shape_of
from .facts import Published
from .family import Call, Family, Inputs, Latent, Side, Tokens, plain_tokens
from .weights import spellings

__all__ = [
    "FAMILIES", "Family", "Inputs", "Latent", "Side", "Tokens", "call_of", "class_names", "family_of", "layout_of",
    "published_as", "record_of", "refuse_unfit", "spelled_layers", "tokens_reader", "trained_size",
]  # fmt: skip

_modules = (importlib.import_module(f".{entry.name}", __name__) for entry in pkgutil.iter_modules(__path__))
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _modules if hasattr(module, "FAMILY"))
"""Families are identified by class: modules of one name may mean different things in two families."""


def class_names(model: Any) -> set[str]:
    """Names of a model's class and of its base classes."""
    return {kind.__name__ for kind in type(model).__mro__}


def record_of(backbone: Any) -> tuple[Family, Side] | None:
    """The family of a backbone and its side (library), by class; None if unknown.

    Refuses nothing: the backbone's modules may be laid out differently.
    """
    backbone = uncompiled(backbone)
    classes = class_names(backbone)
    for family in FAMILIES:
        side = family.diffusers if "ModelMixin" in classes else family.comfyui  # some names are in both
        if side is not None and side.kind in classes and side.fits(backbone):
            return family, side
    return None


def _addressed(backbone: nn.Module) -> tuple[Family, Side]:
    """The family of a backbone and its side, for methods that need its sites or its call."""
    record, name = record_of(backbone), type(uncompiled(backbone)).__name__
    known = ", ".join(f"{library} {family.name}" for family in FAMILIES for library in ("diffusers", "ComfyUI"))
    if record is None:
        raise refuse("backbone", name, known, "pass the UNet or transformer itself, not a pipeline")
    family, side = record
    reason = once(_unsupported_reason, backbone)
    if reason is not None:
        raise refuse("backbone", reason[0], f"{family.name} as the libraries build it", reason[1])
    return family, side


def _unsupported_reason(backbone: nn.Module) -> tuple[str, str] | None:
    record = record_of(backbone)
    return None if record is None else record[0].unsupported_reason(backbone)


def family_of(backbone: nn.Module) -> Family:
    """The family of a backbone of either library."""
    return _addressed(backbone)[0]


def layout_of(backbone: nn.Module) -> tuple[Site, ...]:
    """The sites of a backbone in execution order; found once a network, and anew when its modules have changed."""
    return once(_layout, backbone)


def _layout(backbone: nn.Module) -> tuple[Site, ...]:
    return tuple(_addressed(backbone)[1].sites(backbone))


def tokens_reader(backbone: nn.Module) -> Callable[[Inputs], Tokens]:
    """The reader of token positions in a forward's arguments; that of a plain network if no family fits."""
    record = record_of(backbone)
    return plain_tokens if record is None else record[1].tokens


def trained_size(backbone: nn.Module) -> tuple[int, int] | None:
    """(width, height) in pixels that a family's published weights were trained at; None if unknown."""
    record = record_of(backbone)
    return None if record is None else record[0].trained(uncompiled(backbone))


def spelled_layers(backbone: nn.Module) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """(name, path, rows) of each linear layer, for every name that LoRA files use for it.

    ``rows`` is (start, length) of its outputs, None for all. Yields nothing for networks of unknown families.
    """
    try:
        weights = family_of(backbone).weights
    except VitrineError:  # loaders have their own names for other models
        return
    for path, module in backbone.named_modules():
        shape = shape_of(module)
        if shape is not None:
            yield from ((name, path, rows) for name, rows in spellings(weights, path, shape).items())


def published_as(name: str) -> tuple[Family, Published] | None:
    """The family and published model that student presets call by that name; None for other names."""
    models = ((family, model) for family in FAMILIES for model in family.published)
    return next((pair for pair in models if name in (pair[1].name, *pair[1].presets)), None)


def refuse_unfit(backbone: nn.Module, method: str) -> None:
    """Refuses a backbone that does not support a method (:attr:`Side.refuses`)."""
    record = record_of(backbone)
    refusal = None if record is None else record[1].refuses.get(method)
    if record is not None and refusal is not None:
        shown = f"{type(uncompiled(backbone)).__name__} ({record[0].name}), {refusal.why}"
        raise refuse("model", shown, refusal.accepted, refusal.remedy)


def call_of(backbone: Any) -> Call:
    """The network call of a diffusers backbone, for inputs of any dtype and device.

    x_t and the text are cast to the network's dtype and moved to its device at the moment of the call. Sizes and masks
    keep their dtype, since half precision would round sizes.
    """
    family, side = _addressed(backbone)
    make = family.call
    if side is not family.diffusers or make is None:
        accepted = sorted(family.diffusers.kind for family in FAMILIES if family.call is not None)
        name = type(uncompiled(backbone)).__name__
        raise refuse("backbone", name, accepted, "pass the network of a diffusers pipeline of one of these families")

    def call(x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        device, dtype = placement_of(backbone)
        return make(backbone, x.to(device, dtype), t.to(device), cond.to(device).cast(dtype))

    return call
