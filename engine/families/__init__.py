"""The model families: what differs between them, one file each. A file here with a ``FAMILY`` is one of them."""

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
from ..runtime.placement import device_of, dtype_of
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
"""Told apart by their classes: modules of one name mean other things in another family."""


def class_names(model: Any) -> set[str]:
    """Names of a model's class and of those it derives from."""
    return {kind.__name__ for kind in type(model).__mro__}


def record_of(backbone: Any) -> tuple[Family, Side] | None:
    """The family of a backbone and its side, by its class; None for any other.

    Nothing is refused: the family may have no addresses, and the backbone's modules may be arranged otherwise.
    """
    backbone = uncompiled(backbone)
    classes = class_names(backbone)
    for family in FAMILIES:
        side = family.diffusers if "ModelMixin" in classes else family.comfyui  # some classes have one name in both
        if side is not None and side.kind in classes and side.fits(backbone):
            return family, side
    return None


def _addressed(backbone: nn.Module) -> tuple[Family, Side]:
    """The family of a backbone, and its side, for methods that need its addresses or its call."""
    record, name = record_of(backbone), type(uncompiled(backbone)).__name__
    families = [family for family in FAMILIES if not family.unaddressed]
    known = ", ".join(f"{library} {family.name}" for family in families for library in ("diffusers", "ComfyUI"))
    if record is None:
        raise refuse("backbone", name, known, "pass the UNet or transformer itself, not a pipeline")
    family, side = record
    if side.sites is None:
        raise refuse("backbone", name, known, family.unaddressed)
    reason = once(_unsupported_reason, backbone)
    if reason is not None:
        raise refuse("backbone", reason[0], f"{family.name} as the libraries build it", reason[1])
    return family, side


def _unsupported_reason(backbone: nn.Module) -> tuple[str, str] | None:
    record = record_of(backbone)
    return None if record is None else record[0].unsupported_reason(backbone)


def family_of(backbone: nn.Module) -> Family:
    """The family of a backbone of either library.

    Raises:
        VitrineError: No family with addresses fits, or its class is of one but its modules are not.
    """
    return _addressed(backbone)[0]


def layout_of(backbone: nn.Module) -> tuple[Site, ...]:
    """The sites of a backbone in execution order; found once a network, and anew when its modules have changed.

    Raises:
        VitrineError: As :func:`family_of`.
    """
    return once(_layout, backbone)


def _layout(backbone: nn.Module) -> tuple[Site, ...]:
    sites = _addressed(backbone)[1].sites
    assert sites is not None
    return tuple(sites(backbone))


def tokens_reader(backbone: nn.Module) -> Callable[[Inputs], Tokens]:
    """Reads where image and text tokens are in a forward's arguments; as of a plain network where no family fits."""
    record = record_of(backbone)
    return plain_tokens if record is None else record[1].tokens


def trained_size(backbone: nn.Module) -> tuple[int, int] | None:
    """(width, height) in pixels that a family's published weights were trained at; None where no family says."""
    record = record_of(backbone)
    return None if record is None else record[0].trained(uncompiled(backbone))


def spelled_layers(backbone: nn.Module) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """(name, path, rows) of each linear layer under every name that LoRA files have for it.

    ``rows`` is (start, length) of the outputs that are meant, None for all. Nothing for a network of no family.
    """
    try:
        weights = family_of(backbone).weights
    except VitrineError:  # loaders have names of their own for other models
        return
    for path, module in backbone.named_modules():
        shape = shape_of(module)
        if shape is not None:
            yield from ((name, path, rows) for name, rows in spellings(weights, path, shape).items())


def published_as(name: str) -> tuple[Family, Published] | None:
    """The published model that a student's preset calls by that name, and its family; None for any other name."""
    models = ((family, model) for family in FAMILIES for model in family.published)
    return next((pair for pair in models if name in (pair[1].name, *pair[1].presets)), None)


def refuse_unfit(backbone: nn.Module, method: str) -> None:
    """Refuse a backbone on which a method of :attr:`Side.refuses` cannot be done.

    Raises:
        VitrineError: Its family says so.
    """
    record = record_of(backbone)
    refusal = None if record is None else record[1].refuses.get(method)
    if record is not None and refusal is not None:
        shown = f"{type(uncompiled(backbone)).__name__} ({record[0].name}), {refusal.why}"
        raise refuse("model", shown, refusal.accepted, refusal.remedy)


def call_of(backbone: Any) -> Call:
    """The bare call of a diffusers backbone, for inputs of any precision on any device.

    The only function in which a method's numbers become the network's: x_t and the text are cast to its dtype, and
    everything moves to where it computes at the moment of the call. Sizes and masks keep their dtype:
    half precision rounds sizes.

    Raises:
        VitrineError: As :func:`family_of`, or the backbone is ComfyUI's.
    """
    family, side = _addressed(backbone)
    make = family.call
    if side is not family.diffusers or make is None:
        accepted = sorted(family.diffusers.kind for family in FAMILIES if family.call is not None)
        name = type(uncompiled(backbone)).__name__
        raise refuse("backbone", name, accepted, "pass the network of a diffusers pipeline of one of these families")

    def call(x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        device, dtype = device_of(backbone), dtype_of(backbone)
        return make(backbone, x.to(device, dtype), t.to(device), cond.to(device).cast(dtype))

    return call
