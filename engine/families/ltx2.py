"""LTX-2, without sites: it also denoises sound, which the two libraries mix in in different orders."""

from __future__ import annotations

from .family import Family, Side

FAMILY = Family(
    "LTX-2",
    Side("LTX2VideoTransformer3DModel"),
    Side("LTXAVModel"),
    unaddressed=(
        "LTX-2 denoises a video and its sound in one pass, which diffusers and ComfyUI mix in different orders: a site "
        "would not be one tensor"
    ),
)
