"""Glimmer, a family that nobody has published: docs/add_a_family.md, as a file.

Facts:

- Time: 1 - s; returns x0 - eps. Latents: 4 channels, factor 8, patches of 2 x 2.
- Text: 24 wide, without a mask. LoRA: one name in both libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..network.condition import Condition
from ..network.rotary_embedding import rope_of
from ..network.site import AdaLN, Site
from .cross import CrossBlock, cross_block
from .facts import Published, Refusal
from .family import Family, Latent, Side, square
from .packing import flow_time, text_of

WEIGHTS = {"layer_stack": "layer_stack", "self_attention": "self_attention", "cross_attention": "cross_attention"}


def sites(net: Any) -> Iterator[Site]:
    """GlimmerTransformer2DModel."""
    modules = CrossBlock(
        ("self_attention", "cross_attention"),
        ("to_q", "to_k", "to_v"),
        ("norm_q", "norm_k"),
        "to_out",
        "mlp",
        "mlp.2",
        2,
        lambda args, kwargs: rope_of(args, kwargs),
        norm="norm",
        adaln=lambda path: AdaLN(f"{path}.shift"),
    )
    for b in range(len(net.layer_stack)):
        yield from cross_block(f"vit-block{b}", f"layer_stack.{b}", modules)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Its sign and its time run the other way."""
    return -net(x, 1 - flow_time(t), text_of(cond))


FAMILY = Family(
    "Glimmer",
    Side(
        "GlimmerTransformer2DModel",
        sites,
        refuses={"size": Refusal("which has one size", "one of several sizes", "sample at 64 x 64")},
    ),
    call=call,
    latent=Latent(patch=2),
    weights=WEIGHTS,
    trained=square(64),
    time_input="1 - s",
    stacked=True,
    adapted=("to_q", "to_v"),
    lora_paths=r"layer_stack\.",
    modules=(
        "layer_stack.*.self_attention.to_q",
        "layer_stack.*.self_attention.to_v",
        "layer_stack.*.cross_attention.to_q",
        "layer_stack.*.cross_attention.to_k",
        "layer_stack.*.cross_attention.to_v",
    ),
    published=(Published("Glimmer 1", width=16, other=lambda net: "Glimmer 2" if len(net.layer_stack) > 2 else ""),),
)
