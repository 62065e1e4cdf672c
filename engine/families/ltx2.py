"""LTX-2, which has no addresses: it denoises sound as well, and the two libraries mix it in in another order."""

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
