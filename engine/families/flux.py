"""Flux.1: double blocks with joint attention, then single blocks over the joined tokens; rotary positions.

Addresses are ``vit-block{b}-...``; q, k, v are taken before qk-norm and rotary embedding. Joint attention has one map a
block, ``vit-block{b}-map``: image tokens as queries, text and then image tokens as keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..condition import Condition
from ..site import ModuleSite, Site
from .family import Family, Inputs, Latent, Side, Tokens
from .joint import QKV, fused_stream, joint_map, part, split_stream
from .packing import flow_time, grid_ids, pack, text_of, unpack


def diffusers_sites(net: Any) -> Iterator[Site]:
    """FluxTransformer2DModel: single blocks continue the count of the double ones."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 2}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        for x in QKV:
            yield ModuleSite(f"{name}-{x}", f"{path}.attn.to_{x}", **image)
        for x in QKV:
            yield ModuleSite(f"{name}-ctx-{x}", f"{path}.attn.add_{x}_proj", "text")
        both = (split_stream(net, f"{path}.attn", True), split_stream(net, f"{path}.attn", False))
        last, rope = f"{path}.attn.add_k_proj", f"{path}.attn"
        yield joint_map(f"{name}-map", f"{path}.attn", both, last, block.attn.heads, rope=rope)
        yield ModuleSite(f"{name}-attn-out", f"{path}.attn.to_out.0", **image)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.ff", **image)
        yield ModuleSite(f"{name}-out", path, element=1, **image)
    doubles = len(net.transformer_blocks)
    for j, single in enumerate(net.single_transformer_blocks):
        name, path = f"vit-block{doubles + j}", f"single_transformer_blocks.{j}"
        for x in QKV:
            yield ModuleSite(f"{name}-{x}", f"{path}.attn.to_{x}", joint=True, **image)
        stream = (split_stream(net, f"{path}.attn", False),)
        yield joint_map(
            f"{name}-map", f"{path}.attn", stream, f"{path}.attn.to_k", single.attn.heads, rope=f"{path}.attn"
        )
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.act_mlp", joint=True, **image)
        # diffusers >= 0.35 returns (text, image), older ones the joint sequence: the reader accepts both.
        yield ModuleSite(f"{name}-out", path, element=1, joint=True, **image)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """Flux: the image stream comes first in a double block's output; single blocks fuse q, k, v with the MLP."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b in range(len(net.double_blocks)):
        name, path = f"vit-block{b}", f"double_blocks.{b}"
        for i, x in enumerate(QKV):
            yield ModuleSite(
                f"{name}-{x}", f"{path}.img_attn.qkv", columns=part(net, f"{path}.img_attn.qkv", i, 3), **image
            )
        for i, x in enumerate(QKV):
            yield ModuleSite(
                f"{name}-ctx-{x}", f"{path}.txt_attn.qkv", "text", columns=part(net, f"{path}.txt_attn.qkv", i, 3)
            )
        norms = ("norm.query_norm", "norm.key_norm")
        both = tuple(fused_stream(net, f"{path}.{s}_attn", norms) for s in ("txt", "img"))
        heads = int(net.num_heads)
        yield joint_map(f"{name}-map", path, both, f"{path}.txt_attn.qkv", heads, rope=path)
        yield ModuleSite(f"{name}-attn-out", f"{path}.img_attn.proj", **image)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.img_mlp.1", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.img_mlp", **image)
        yield ModuleSite(f"{name}-out", path, element=0, **image)
    doubles, width = len(net.double_blocks), int(net.hidden_size)
    for j in range(len(net.single_blocks)):
        name, path = f"vit-block{doubles + j}", f"single_blocks.{j}"
        for i, x in enumerate(QKV):
            yield ModuleSite(f"{name}-{x}", f"{path}.linear1", joint=True, columns=(i * width, width), **image)
        stream = (fused_stream(net, path, ("norm.query_norm", "norm.key_norm"), "linear1", width),)
        yield joint_map(f"{name}-map", path, stream, f"{path}.linear1", int(net.num_heads), rope=path)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.mlp_act", joint=True, **image)
        yield ModuleSite(f"{name}-out", path, joint=True, **image)


def packed_tokens(given: Inputs) -> Tokens:
    """diffusers' Flux takes packed latents (B, N, C) with the position (_, row, column) of each token."""
    x, text, ids = given(0, "hidden_states"), given(1, "encoder_hidden_states"), given(5, "img_ids")
    rows, columns = (0, 0) if given.known else given.sides(ids.reshape(-1, 3)[:, 1:])
    return Tokens(x.shape[0], given.known or (2 * rows, 2 * columns), text=text.shape[1])


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Flux works on 2 x 2 patches in row-major order and takes the time in [0, 1]."""
    text = text_of(cond)
    out = net(
        hidden_states=pack(x),
        encoder_hidden_states=text,
        pooled_projections=cond.pooled,
        timestep=flow_time(t),
        img_ids=grid_ids(x),
        txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
        guidance=cond.extra.get("guidance"),
    ).sample
    return unpack(out, x)


def strangeness(net: Any) -> tuple[str, str] | None:
    """ComfyUI builds Flux.2 and others from the class of Flux.1, with other wiring."""
    params = getattr(net, "params", None)
    if params is not None and (params.patch_size != 2 or getattr(params, "global_modulation", False)):
        return "Flux.2, or another model built from the class of Flux.1", "this model has no layout here yet"
    return None


FAMILY = Family(
    "Flux",
    Side("FluxTransformer2DModel", diffusers_sites, packed_tokens),
    Side("Flux", comfyui_sites),
    call,
    Latent(16),
    strangeness=strangeness,
)
