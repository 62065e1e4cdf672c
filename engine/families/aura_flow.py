"""AuraFlow; only the trained size is supported."""

from __future__ import annotations

from .facts import Published
from .family import Family, Side

FAMILY = Family(
    "AuraFlow",
    Side("AuraFlowTransformer2DModel"),
    unaddressed="it has no layout here yet",
    published=(Published("AuraFlow", config="AuraFlow", side=(1024, 1024)),),
)
