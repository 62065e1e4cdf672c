"""Transformers: PixArt, SD3 (MMDiT) and Flux, in diffusers' and in ComfyUI's layout.

Addresses are ``vit-block{b}-...``; q, k, v are taken before qk-norm and rotary embedding. Slices are on the last axis.
Joint attention has one map a block, ``vit-block{b}-map``: image tokens as queries, text and then image tokens as keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..addresses import Site, Stream

_QKV = ("q", "k", "v")


def _map(address: str, path: str, query: str, key: str, **more: Any) -> Site:
    return Site(address, path, "map", query=f"{path}.{query}", key=f"{path}.{key}", **more)


def _joint(address: str, path: str, streams: tuple[Stream, ...], last: str, heads: int, **more: Any) -> Site:
    """A joint map with the text stream first; only image tokens are kept as queries."""
    return Site(address, path, "map", key=last, heads=heads, streams=streams, skip_text=True, **more)


def _norm(net: Any, path: str) -> str:
    """The path of a norm the model really has, else ""."""
    parent, _, name = path.rpartition(".")
    return path if getattr(net.get_submodule(parent), name, None) is not None else ""


def _split(net: Any, path: str, text: bool) -> Stream:
    """diffusers' separate projections of the text or the image stream."""
    query, key = ("add_q_proj", "add_k_proj") if text else ("to_q", "to_k")
    norms = ("norm_added_q", "norm_added_k") if text else ("norm_q", "norm_k")
    found = [_norm(net, f"{path}.{n}") for n in norms]
    return Stream(f"{path}.{query}", f"{path}.{key}", norm_query=found[0], norm_key=found[1])


def _fused(net: Any, path: str, norms: tuple[str, str], projection: str = "qkv") -> Stream:
    """ComfyUI's fused projections of one stream."""
    whole = f"{path}.{projection}"
    found = [_norm(net, f"{path}.{n}") for n in norms]
    return Stream(whole, whole, (0, 3), (1, 3), norm_query=found[0], norm_key=found[1])


# --- PixArt -------------------------------------------------------------------------------------------------------
def pixart_diffusers(net: Any) -> Iterator[Site]:
    """PixArtTransformer2DModel."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": net.config.patch_size}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        for x in _QKV:
            yield Site(f"{name}-self-{x}", f"{path}.attn1.to_{x}", **image)
        yield _map(f"{name}-self-map", f"{path}.attn1", "to_q", "to_k", heads=block.attn1.heads)
        yield Site(f"{name}-self-out", f"{path}.attn1.to_out.0", **image)
        yield Site(f"{name}-cross-q", f"{path}.attn2.to_q", **image)
        for x in ("k", "v"):
            yield Site(f"{name}-cross-{x}", f"{path}.attn2.to_{x}", "text")
        yield _map(f"{name}-cross-map", f"{path}.attn2", "to_q", "to_k", heads=block.attn2.heads, text_keys=True)
        yield Site(f"{name}-cross-out", f"{path}.attn2.to_out.0", **image)
        yield Site(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield Site(f"{name}-ffn-out", f"{path}.ff", **image)
        yield Site(f"{name}-out", path, **image)


def pixart_comfyui(net: Any) -> Iterator[Site]:
    """PixArt / PixArtMS: fused qkv and kv; the cross-attention folds the batch into one row."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b, block in enumerate(net.blocks):
        name, path, heads = f"vit-block{b}", f"blocks.{b}", int(block.attn.num_heads)
        for i, x in enumerate(_QKV):
            yield Site(f"{name}-self-{x}", f"{path}.attn.qkv", columns=(i, 3), **image)
        fused: dict[str, Any] = {"columns": (0, 3), "key_columns": (1, 3)}
        yield _map(f"{name}-self-map", f"{path}.attn", "qkv", "qkv", heads=heads, **fused)
        yield Site(f"{name}-self-out", f"{path}.attn.proj", **image)
        yield Site(f"{name}-cross-q", f"{path}.cross_attn.q_linear", flat_batch=True, **image)
        for i, x in enumerate(("k", "v")):
            yield Site(f"{name}-cross-{x}", f"{path}.cross_attn.kv_linear", "text", columns=(i, 2), flat_batch=True)
        packed: dict[str, Any] = {"key_columns": (0, 2), "flat_batch": True, "text_keys": True}
        yield _map(f"{name}-cross-map", f"{path}.cross_attn", "q_linear", "kv_linear", heads=heads, **packed)
        yield Site(f"{name}-cross-out", f"{path}.cross_attn.proj", **image)
        yield Site(f"{name}-ffn-inner", f"{path}.mlp.act", **image)
        yield Site(f"{name}-ffn-out", f"{path}.mlp", **image)
        yield Site(f"{name}-out", path, **image)


# --- SD3 ----------------------------------------------------------------------------------------------------------
def sd3_diffusers(net: Any) -> Iterator[Site]:
    """SD3Transformer2DModel, with the second self-attention of SD3.5-medium where a block has it."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": net.config.patch_size}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        for x in _QKV:
            yield Site(f"{name}-{x}", f"{path}.attn.to_{x}", **image)
        for x in _QKV:
            yield Site(f"{name}-ctx-{x}", f"{path}.attn.add_{x}_proj", "text")
        both = (_split(net, f"{path}.attn", True), _split(net, f"{path}.attn", False))
        yield _joint(f"{name}-map", f"{path}.attn", both, f"{path}.attn.add_k_proj", block.attn.heads)
        yield Site(f"{name}-attn-out", f"{path}.attn.to_out.0", **image)
        if getattr(block, "attn2", None) is not None:
            for x in _QKV:
                yield Site(f"{name}-attn2-{x}", f"{path}.attn2.to_{x}", **image)
            alone: dict[str, Any] = {"streams": (_split(net, f"{path}.attn2", False),), "heads": block.attn2.heads}
            yield Site(f"{name}-attn2-map", f"{path}.attn2", "map", key=f"{path}.attn2.to_k", **alone)
        yield Site(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield Site(f"{name}-ffn-out", f"{path}.ff", **image)
        yield Site(f"{name}-out", path, element=1, **image)


def sd3_comfyui(net: Any) -> Iterator[Site]:
    """MMDiT: hooks on ``x_block`` itself never fire, its children's do."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b, block in enumerate(net.joint_blocks):
        name, path = f"vit-block{b}", f"joint_blocks.{b}"
        for i, x in enumerate(_QKV):
            yield Site(f"{name}-{x}", f"{path}.x_block.attn.qkv", columns=(i, 3), **image)
        for i, x in enumerate(_QKV):
            yield Site(f"{name}-ctx-{x}", f"{path}.context_block.attn.qkv", "text", columns=(i, 3))
        norms = ("ln_q", "ln_k")
        both = tuple(_fused(net, f"{path}.{s}.attn", norms) for s in ("context_block", "x_block"))
        heads = int(block.x_block.attn.num_heads)
        yield _joint(f"{name}-map", path, both, f"{path}.x_block.attn.qkv", heads)
        yield Site(f"{name}-attn-out", f"{path}.x_block.attn.proj", **image)
        if getattr(block.x_block, "attn2", None) is not None:
            for i, x in enumerate(_QKV):
                yield Site(f"{name}-attn2-{x}", f"{path}.x_block.attn2.qkv", columns=(i, 3), **image)
            alone: dict[str, Any] = {"streams": (_fused(net, f"{path}.x_block.attn2", norms),)}
            alone["heads"] = int(block.x_block.attn2.num_heads)
            yield Site(f"{name}-attn2-map", path, "map", key=f"{path}.x_block.attn2.qkv", **alone)
        yield Site(f"{name}-ffn-inner", f"{path}.x_block.mlp.act", **image)
        yield Site(f"{name}-ffn-out", f"{path}.x_block.mlp", **image)
        yield Site(f"{name}-out", path, element=1, **image)


# --- Flux ---------------------------------------------------------------------------------------------------------
def flux_diffusers(net: Any) -> Iterator[Site]:
    """FluxTransformer2DModel: single blocks continue the count of the double ones."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 2}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        for x in _QKV:
            yield Site(f"{name}-{x}", f"{path}.attn.to_{x}", **image)
        for x in _QKV:
            yield Site(f"{name}-ctx-{x}", f"{path}.attn.add_{x}_proj", "text")
        both = (_split(net, f"{path}.attn", True), _split(net, f"{path}.attn", False))
        last, rope = f"{path}.attn.add_k_proj", f"{path}.attn"
        yield _joint(f"{name}-map", f"{path}.attn", both, last, block.attn.heads, rope=rope)
        yield Site(f"{name}-attn-out", f"{path}.attn.to_out.0", **image)
        yield Site(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield Site(f"{name}-ffn-out", f"{path}.ff", **image)
        yield Site(f"{name}-out", path, element=1, **image)
    doubles = len(net.transformer_blocks)
    for j, single in enumerate(net.single_transformer_blocks):
        name, path = f"vit-block{doubles + j}", f"single_transformer_blocks.{j}"
        for x in _QKV:
            yield Site(f"{name}-{x}", f"{path}.attn.to_{x}", skip_text=True, **image)
        one = (_split(net, f"{path}.attn", False),)
        yield _joint(f"{name}-map", f"{path}.attn", one, f"{path}.attn.to_k", single.attn.heads, rope=f"{path}.attn")
        yield Site(f"{name}-ffn-inner", f"{path}.act_mlp", skip_text=True, **image)
        # diffusers >= 0.35 returns (text, image), older ones the joint sequence: the reader accepts both.
        yield Site(f"{name}-out", path, element=1, skip_text=True, **image)


def flux_comfyui(net: Any) -> Iterator[Site]:
    """Flux: the image stream comes first in a double block's output; single blocks fuse q, k, v with the MLP."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b in range(len(net.double_blocks)):
        name, path = f"vit-block{b}", f"double_blocks.{b}"
        for i, x in enumerate(_QKV):
            yield Site(f"{name}-{x}", f"{path}.img_attn.qkv", columns=(i, 3), **image)
        for i, x in enumerate(_QKV):
            yield Site(f"{name}-ctx-{x}", f"{path}.txt_attn.qkv", "text", columns=(i, 3))
        norms = ("norm.query_norm", "norm.key_norm")
        both = tuple(_fused(net, f"{path}.{s}_attn", norms) for s in ("txt", "img"))
        heads = int(net.num_heads)
        yield _joint(f"{name}-map", path, both, f"{path}.txt_attn.qkv", heads, rope=path)
        yield Site(f"{name}-attn-out", f"{path}.img_attn.proj", **image)
        yield Site(f"{name}-ffn-inner", f"{path}.img_mlp.1", **image)
        yield Site(f"{name}-ffn-out", f"{path}.img_mlp", **image)
        yield Site(f"{name}-out", path, element=0, **image)
    doubles, width = len(net.double_blocks), int(net.hidden_size)
    for j in range(len(net.single_blocks)):
        name, path = f"vit-block{doubles + j}", f"single_blocks.{j}"
        for i, x in enumerate(_QKV):
            fused: dict[str, Any] = {"columns": (i, 3), "width": width}
            yield Site(f"{name}-{x}", f"{path}.linear1", skip_text=True, **fused, **image)
        one = (_fused(net, path, ("norm.query_norm", "norm.key_norm"), "linear1"),)
        yield _joint(f"{name}-map", path, one, f"{path}.linear1", int(net.num_heads), rope=path, width=width)
        yield Site(f"{name}-ffn-inner", f"{path}.mlp_act", skip_text=True, **image)
        yield Site(f"{name}-out", path, skip_text=True, **image)
