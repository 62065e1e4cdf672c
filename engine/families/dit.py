"""DiT, conditioned on ImageNet classes: each block embeds the timestep and the class itself."""

from __future__ import annotations

from .facts import TimeEmbedding
from .family import Family, Side

FAMILY = Family(
    "DiT",
    Side(
        "DiTTransformer2DModel",
        time=TimeEmbedding(
            lambda net: net.inner_dim,
            # The final layer reads block 0's embedding, so it is covered.
            lambda net: [f"transformer_blocks.{i}.norm1.emb" for i in range(len(net.transformer_blocks))],
            in_blocks=True,
        ),
    ),
    unaddressed="it takes classes, not prompts, and has no layout here",
    time_input="timestep",
)
