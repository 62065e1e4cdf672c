"""Inputs that several control nodes share."""

from __future__ import annotations

from comfy_api.latest import io

from ..engine.control import CLOCKS, FORMS
from ..engine.control.reference_blend import Reference

CATEGORY = "Vitrine/size conditioning"
REFERENCES = ("target", "zeros", "size below")
GAMMA = [
    io.Combo.Input(
        "form", options=list(FORMS), default="power_cos",
        tooltip="Curve of the weight over the noise level: 0 at full noise, 1 at none. constant: as the stock model.",
    ),
    io.Float.Input(
        "alpha", default=1.0, min=0.05, max=32.0, step=0.05,
        tooltip="How late the size sets in. 1 suits untrained use; at 8 it acts on the last tenth of the run only.",
    ),
    io.Combo.Input(
        "clock", options=list(CLOCKS), default="native",
        tooltip="native: the timestep that conditions the network. paper_sigma: for flow models, by their noise level.",
    ),
    io.Combo.Input(
        "reference", options=list(REFERENCES), default="target",
        tooltip="The neutral size, used while the weight is 0. target: neither enlarged nor reduced.",
    ),
    io.Int.Input("reference_width", default=1024, min=8, max=16384, tooltip="For 'size below', in pixels."),
    io.Int.Input("reference_height", default=1024, min=8, max=16384, tooltip="For 'size below', in pixels."),
]  # fmt: skip


def pixels(name: str, default: int, least: int, tooltip: str) -> io.Int.Input:
    """A length in pixels."""
    return io.Int.Input(name, default=default, min=least, max=16384, tooltip=tooltip)


def reference_of(reference: str, width: int, height: int) -> Reference:
    """The engine's reference from the widgets."""
    return (height, width) if reference == "size below" else reference
