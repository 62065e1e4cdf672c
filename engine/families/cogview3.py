"""CogView3-Plus: size conditioning as in SDXL, in the order original, crop, target."""

from __future__ import annotations

from typing import Any

from .facts import SizeInput
from .family import Family, Side


def sizes(net: Any) -> SizeInput:
    """The first two and the last two of six sinusoids."""
    emb, c = net.time_condition_embed, net.config.condition_dim
    path = "time_condition_embed.condition_embedder"
    return SizeInput(path, emb.condition_proj, slice(0, 2 * c), slice(4 * c, 6 * c))


FAMILY = Family(
    "CogView3-Plus",
    Side("CogView3PlusTransformer2DModel", sizes=sizes),
    unaddressed="it has no layout here yet",
    time_input="timestep",
)
