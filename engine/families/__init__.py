"""The model families: what differs between them, one file each. A file here with a ``FAMILY`` is one of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..compiled import uncompiled
from ..condition import Condition
from ..errors import refuse
from ..placement import device_of, dtype_of
from ..site import Site
from .family import Call, Family, Inputs, Latent, Side, Tokens, plain_tokens

__all__ = [
    "FAMILIES", "Family", "Inputs", "Latent", "Tokens", "call_of", "family_of", "layout_of", "tokens_reader",
    "trained_size",
]  # fmt: skip

_modules = (importlib.import_module(f".{entry.name}", __name__) for entry in pkgutil.iter_modules(__path__))
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _modules if hasattr(module, "FAMILY"))
"""Told apart by their classes: modules of one name mean other things in another family."""


_LTX2 = (
    "LTX-2 denoises a video and its sound in one pass, and diffusers and ComfyUI mix the two in another order: an "
    "address would not be one tensor"
)
_REFUSED = {"LTX2VideoTransformer3DModel": _LTX2, "LTXAVModel": _LTX2}
"""Class of either library -> why it has no family."""


def _found(backbone: nn.Module) -> tuple[Family, Side]:
    """The family of a backbone, and its side."""
    backbone = uncompiled(backbone)
    for family in FAMILIES:
        side = family.side(backbone)
        if side is not None:
            return family, side
    known = ", ".join(f"{library} {family.name}" for family in FAMILIES for library in ("diffusers", "ComfyUI"))
    name = type(backbone).__name__
    if name in _REFUSED:
        raise refuse("backbone", name, known, _REFUSED[name])
    raise refuse("backbone", name, known, "pass the UNet or transformer itself, not a pipeline")


def family_of(backbone: nn.Module) -> Family:
    """The family of a backbone of either library.

    Raises:
        VitrineError: No family fits, or its class is of one but its modules are not.
    """
    return _found(backbone)[0]


def layout_of(backbone: nn.Module) -> Iterator[Site]:
    """The sites of a backbone in execution order.

    Raises:
        VitrineError: As :func:`family_of`.
    """
    return _found(backbone)[1].sites(uncompiled(backbone))


def tokens_reader(backbone: nn.Module) -> Callable[[Inputs], Tokens]:
    """Reads where image and text tokens are in a forward's arguments; as of a plain network where no family fits."""
    backbone = uncompiled(backbone)
    kinds = {kind.__name__ for kind in type(backbone).__mro__}
    diffusers = "ModelMixin" in kinds
    sides = (family.diffusers if diffusers else family.comfyui for family in FAMILIES)
    return next((side.tokens for side in sides if side.kind in kinds and side.fits(backbone)), plain_tokens)


def trained_size(backbone: nn.Module) -> tuple[int, int] | None:
    """(width, height) in pixels that a family's published weights were trained at; None where no family says."""
    backbone = uncompiled(backbone)
    kinds = {kind.__name__ for kind in type(backbone).__mro__}
    for family in FAMILIES:
        side = family.diffusers if "ModelMixin" in kinds else family.comfyui
        if side.kind in kinds and side.fits(backbone):
            return family.trained(backbone)
    return None


def call_of(backbone: Any) -> Call:
    """The bare call of a diffusers backbone, for inputs of any precision on any device.

    The one place where a method's numbers become the network's: x_t and the text are cast to its dtype, and everything
    moves to where it computes at the moment of the call. Sizes and masks keep their dtype: half precision rounds sizes.

    Raises:
        VitrineError: As :func:`family_of`, or the backbone is ComfyUI's.
    """
    kind = type(uncompiled(backbone))
    kinds, name = {base.__name__ for base in kind.__mro__}, kind.__name__
    if not any(family.diffusers.kind in kinds for family in FAMILIES):
        accepted = sorted(family.diffusers.kind for family in FAMILIES)
        if name in _REFUSED:
            raise refuse("backbone", name, accepted, _REFUSED[name])
        raise refuse("backbone", name, accepted, "pass a pipeline of one of these families")
    make = family_of(backbone).call  # refuses what has other modules

    def call(x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        device, dtype = device_of(backbone), dtype_of(backbone)
        return make(backbone, x.to(device, dtype), t.to(device), cond.to(device).cast(dtype))

    return call
