"""LTX-2, which has no addresses; ``tests/comfy/test_ltx2.py`` shows why and fails when that changes."""

from __future__ import annotations

from .family import Family, Side

FAMILY = Family(
    "LTX-2",
    Side("LTX2VideoTransformer3DModel"),
    Side("LTXAVModel"),
    unaddressed=(
        "LTX-2 denoises a video and its sound in one pass, and diffusers and ComfyUI mix the two in another order: an "
        "address would not be one tensor"
    ),
)
