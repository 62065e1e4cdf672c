"""The sites of transformers with joint attention: one map per block, over text and image tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..network.rotary_embedding import rope_of
from ..network.site import AdaLN, Columns, MapSite, ModuleSite, Site, Stream

QKV = ("q", "k", "v")


def part(net: Any, path: str, i: int, n: int) -> Columns:
    """(start, length) of the i-th of n equal parts of a linear layer's outputs."""
    layer = net.get_submodule(path)
    width = int(layer.out_features if hasattr(layer, "out_features") else layer.weight.shape[0]) // n
    return i * width, width


def joint_map(address: str, path: str, streams: tuple[Stream, ...], last: str, heads: int, **more: Any) -> MapSite:
    """A map over both streams; queries are image tokens, keys are text, then image.

    Args:
        last: the projection that runs last in a forward; it completes the map.
    """
    return MapSite(address, path, key=last, heads=heads, streams=streams, joint=True, **{"rotary": rope_of} | more)


def split_stream(net: Any, path: str, text: bool) -> Stream:
    """diffusers' separate projections of the text or the image stream."""
    query, key = ("add_q_proj", "add_k_proj") if text else ("to_q", "to_k")
    norms = ("norm_added_q", "norm_added_k") if text else ("norm_q", "norm_k")
    norm_query, norm_key = (norm_at(net, f"{path}.{n}") for n in norms)
    return Stream(f"{path}.{query}", f"{path}.{key}", norm_query=norm_query, norm_key=norm_key)


def fused_stream(net: Any, path: str, norms: tuple[str, str], projection: str = "qkv", width: int = 0) -> Stream:
    """ComfyUI's fused projections of one stream; ``width`` if q, k and v are only a part of it."""
    whole = f"{path}.{projection}"
    query, key = ((i * width, width) if width else part(net, whole, i, 3) for i in (0, 1))
    norm_query, norm_key = (norm_at(net, f"{path}.{n}") for n in norms)
    return Stream(whole, whole, query, key, norm_query=norm_query, norm_key=norm_key)


def split_attention(net: Any, name: str, path: str, image: Mapping[str, Any], **turned: Any) -> Iterator[Site]:
    """diffusers' joint attention at ``path``, where q, k and v are separate layers: ``-q`` .. ``-map``, ``-attn-out``.

    Args:
        image: fields of the sites of image tokens.
        turned: rotary fields of the map.
    """
    for x in QKV:
        yield ModuleSite(f"{name}-{x}", f"{path}.to_{x}", **image)
    for x in QKV:
        yield ModuleSite(f"{name}-ctx-{x}", f"{path}.add_{x}_proj", "text")
    both = (split_stream(net, path, True), split_stream(net, path, False))
    heads = int(net.get_submodule(path).heads)
    yield joint_map(f"{name}-map", path, both, f"{path}.add_k_proj", heads, **turned)
    yield ModuleSite(f"{name}-attn-out", f"{path}.to_out.0", **image)


def fused_attention(
    net: Any,
    name: str,
    path: str,
    attentions: tuple[str, str],
    norms: tuple[str, str],
    image: Mapping[str, Any],
    **joint: Any,
) -> Iterator[Site]:
    """ComfyUI's joint attention in the block at ``path``, where q, k and v are one layer: the same sites.

    Args:
        attentions: of image and of text, each with ``qkv`` and ``proj``.
        norms: of queries and keys, inside each.
        image: fields of the sites of image tokens.
        joint: the layer that runs last, the heads, and rotary fields of the map.
    """
    kinds: tuple[tuple[str, Mapping[str, Any]], ...] = (("", image), ("ctx-", {"kind": "text"}))
    for attention, (prefix, kind) in zip(attentions, kinds, strict=True):
        for i, x in enumerate(QKV):
            fused = f"{attention}.qkv"
            yield ModuleSite(f"{name}-{prefix}{x}", fused, columns=part(net, fused, i, 3), **kind)
    both = tuple(fused_stream(net, attention, norms) for attention in reversed(attentions))
    yield joint_map(f"{name}-map", path, both, **joint)
    yield ModuleSite(f"{name}-attn-out", f"{attentions[0]}.proj", **image)


def block_input(name: str, norm: str, adaln: AdaLN, **more: Any) -> ModuleSite:
    """A block's input, ``-in``: the input of its first norm."""
    return ModuleSite(f"{name}-in", norm, before=True, adaln=adaln, **more)


def scale_alone(norm: str, modulation: str) -> Callable[[str], AdaLN]:
    """Path of a block -> its AdaLN: an RMS norm scaled by the first of four parts, without a shift."""

    def adaln(path: str) -> AdaLN:
        weight = f"{path}.{norm}.weight"
        return AdaLN(f"{path}.{modulation}", None, 0, 4, rms=True, weight=weight, eps=1e-5)

    return adaln


def norm_at(net: Any, path: str) -> str:
    """The path of a norm if the model has it, else ""."""
    parent, _, name = path.rpartition(".")
    return path if getattr(net.get_submodule(parent), name, None) is not None else ""


# --- blocks over one sequence of image and text tokens --------------------------------------------------------------
@dataclass(frozen=True)
class JointBlock:
    """The modules of a block whose projections are shared by image and text tokens; paths are relative to it.

    Attributes:
        projections: of queries, keys and values, with their slices if they are fused.
        norms: of queries and keys, or "".
        attn_out, mlp_in, mlp: attention's output projection, the module whose input is the MLP's inner activation, the
            MLP.
        heads: of the queries.
        rope: module that receives the rotary embedding; ``rotary`` finds it in its arguments.
        whole_norm: the norms act on all heads together.
        norm: the norm before attention, whose input is the block's.
        adaln: path -> how the block at it modulates that norm.
    """

    projections: Sequence[tuple[str, Columns | None]]
    norms: tuple[str, str]
    attn_out: str
    mlp_in: str
    mlp: str
    heads: int
    rope: str
    rotary: Callable[[tuple, dict[str, Any]], Any]
    whole_norm: bool = False
    norm: str = ""
    adaln: Callable[[str], AdaLN] = AdaLN


def joint_block(name: str, path: str, block: JointBlock, patch: int = 2) -> Iterator[Site]:
    """The sites of such a block: image tokens as ``-in`` .. ``-out``, text tokens of q, k and v as ``-ctx-``."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": patch, "joint": True}
    text: dict[str, Any] = {"kind": "text", "patch": patch, "joint": True}
    if block.norm:
        yield block_input(name, f"{path}.{block.norm}", block.adaln(path), **image)
    projections = list(zip(QKV, block.projections, strict=True))
    for x, (where, columns) in projections:
        yield ModuleSite(f"{name}-{x}", f"{path}.{where}", columns=columns, **image)
    for x, (where, columns) in projections:
        yield ModuleSite(f"{name}-ctx-{x}", f"{path}.{where}", columns=columns, **text)
    (query, query_columns), (key, key_columns), _ = block.projections
    norm_query, norm_key = (f"{path}.{norm}" if norm else "" for norm in block.norms)
    paths, columns_of_both = (f"{path}.{query}", f"{path}.{key}"), (query_columns, key_columns)
    stream = Stream(*paths, *columns_of_both, norm_query, norm_key, block.whole_norm)
    rope = f"{path}.{block.rope}".rstrip(".")
    more: dict[str, Any] = {"rope": rope, "rotary": block.rotary, "patch": patch}
    yield joint_map(f"{name}-map", path, (stream,), f"{path}.{key}", block.heads, **more)
    yield ModuleSite(f"{name}-attn-out", f"{path}.{block.attn_out}", **image)
    if block.mlp_in:
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.{block.mlp_in}", before=True, **image)
    yield ModuleSite(f"{name}-ffn-out", f"{path}.{block.mlp}", **image)
    yield ModuleSite(f"{name}-out", path, **image)
