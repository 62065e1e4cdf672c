"""The model families: what differs between them, one file each. A new one joins ``FAMILIES``; nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import refuse
from ..site import Site
from . import flux, pixart, sd3, unet
from .family import Call, Family

FAMILIES: tuple[Family, ...] = (unet.FAMILY, flux.FAMILY, pixart.FAMILY, sd3.FAMILY)
"""In the order in which a backbone is tried: some have a superset of another's modules."""


def layout_of(backbone: nn.Module) -> Iterator[Site]:
    """The sites of a backbone in execution order.

    Raises:
        VitrineError: no family fits.
    """
    for family in FAMILIES:
        sites = family.sites(backbone)
        if sites is not None:
            return sites
    known = ", ".join(f"{library} {family.name}" for family in FAMILIES for library in ("diffusers", "ComfyUI"))
    raise refuse("backbone", type(backbone).__name__, known, "pass the UNet or transformer itself, not a pipeline")


def call_of(backbone: Any) -> Call:
    """The bare call of a diffusers backbone.

    Raises:
        VitrineError: a class of no known family.
    """
    calls = {family.class_name: family.call for family in FAMILIES}
    make = calls.get(type(backbone).__name__)
    if make is None:
        raise refuse("backbone", type(backbone).__name__, sorted(calls), "pass a pipeline of one of these families")
    return lambda x, t, cond: make(backbone, x, t, cond)
