"""Inputs that several control nodes share."""

from __future__ import annotations

from comfy_api.latest import io

from ..engine.control import FORMS, GammaConfig
from ..engine.control.reference_blend import Reference
from .config_inputs import input_of, inputs_of

CATEGORY = "Vitrine/size conditioning"
REFERENCES = ("target", "zeros", "size below")
GAMMA = [
    input_of(GammaConfig, "form", options=list(FORMS)),
    *inputs_of(GammaConfig, "alpha", "clock"),
    io.Combo.Input(
        "reference",
        options=list(REFERENCES),
        default="target",
        tooltip="The neutral size, used while the weight is 0. target: neither enlarged nor reduced.",
    ),
    io.Int.Input("reference_width", default=1024, min=8, max=16384, tooltip="For 'size below', in pixels."),
    io.Int.Input("reference_height", default=1024, min=8, max=16384, tooltip="For 'size below', in pixels."),
]


def pixels(name: str, default: int, least: int, tooltip: str) -> io.Int.Input:
    """A length in pixels."""
    return io.Int.Input(name, default=default, min=least, max=16384, tooltip=tooltip)


def reference_of(reference: str, width: int, height: int) -> Reference:
    """The engine's reference from the widgets."""
    return (height, width) if reference == "size below" else reference
