"""Which members of a matrix run with every change, and which at night."""

import pytest

EVERY_DAY = ("flux", "wan")
"""Of the transformer families: one with joint attention, one with cross-attention. The UNet is in most files."""
SLOW = ("chroma", "klein", "z_image")
"""Families whose pipelines take seconds a case: at night."""


def nightly_but(names, kept=EVERY_DAY):
    """Parameters of a test, values or tuples of them: all, those that are not kept marked nightly."""
    values = {name: name if isinstance(name, tuple) else (name,) for name in names}
    return [name if name in kept else pytest.param(*values[name], marks=pytest.mark.nightly) for name in names]


def page_modes(kept):
    """Parameter ``vue`` of a test in ComfyUI's page: ``kept``, "classic" or "Nodes 2.0", and the other one at night."""
    modes = {"classic": False, "Nodes 2.0": True}
    return pytest.mark.parametrize(
        "vue",
        [pytest.param(vue, id=name, marks=() if name == kept else pytest.mark.nightly) for name, vue in modes.items()],
    )
