"""Hunyuan-DiT: size conditioning after the pooled text, in the order original, target, crop."""

from __future__ import annotations

from typing import Any

from ..errors import refuse
from .facts import Published, SizeInput
from .family import Family, Side


def sizes(net: Any) -> SizeInput:
    """Sinusoids of 256 channels after the pooled text."""
    emb, first = net.time_extra_emb, net.config.pooled_projection_dim
    if not emb.use_style_cond_and_image_meta_size:
        raise refuse("use_style_cond_and_image_meta_size", False, "True", "this model has no size conditioning")
    channels = slice(first, first + 512), slice(first + 512, first + 1024)
    return SizeInput("time_extra_emb.extra_embedder", emb.size_proj, *channels)


FAMILY = Family(
    "Hunyuan-DiT",
    Side("HunyuanDiT2DModel", sizes=sizes),
    unaddressed="it has no layout here yet",
    time_input="timestep",
    published=(Published("Hunyuan-DiT", config="HunyuanDiT", side=(1024, 1024)),),
)
