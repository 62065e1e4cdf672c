"""The model families: what differs between them, one file each. A new one joins ``FAMILIES``; nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..compiled import uncompiled
from ..condition import Condition
from ..errors import refuse
from ..placement import device_of, dtype_of
from ..site import Site
from . import flux, pixart, sd3, unet
from .family import Call, Family

FAMILIES: tuple[Family, ...] = (unet.FAMILY, flux.FAMILY, pixart.FAMILY, sd3.FAMILY)
"""Told apart by their classes: modules of one name mean other things in another family."""


def layout_of(backbone: nn.Module) -> Iterator[Site]:
    """The sites of a backbone in execution order.

    Raises:
        VitrineError: no family fits.
    """
    backbone = uncompiled(backbone)
    for family in FAMILIES:
        sites = family.sites(backbone)
        if sites is not None:
            return sites
    known = ", ".join(f"{library} {family.name}" for family in FAMILIES for library in ("diffusers", "ComfyUI"))
    raise refuse("backbone", type(backbone).__name__, known, "pass the UNet or transformer itself, not a pipeline")


def call_of(backbone: Any) -> Call:
    """The bare call of a diffusers backbone, for inputs of any precision on any device.

    The one place where a method's numbers become the network's: x_t and the text are cast to its dtype, and everything
    moves to where it computes at the moment of the call. Sizes and masks keep their dtype: half precision rounds sizes.

    Raises:
        VitrineError: a class of no known family.
    """
    calls = {family.diffusers: family.call for family in FAMILIES}
    make = next((calls[kind.__name__] for kind in type(backbone).__mro__ if kind.__name__ in calls), None)
    if make is None:
        raise refuse("backbone", type(backbone).__name__, sorted(calls), "pass a pipeline of one of these families")

    def call(x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        device, dtype = device_of(backbone), dtype_of(backbone)
        return make(backbone, x.to(device, dtype), t.to(device), cond.to(device).cast(dtype))

    return call
