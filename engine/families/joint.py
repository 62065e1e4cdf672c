"""What transformers with joint attention share: one map a block, over text and image tokens."""

from __future__ import annotations

from typing import Any

from ..rotary import rope_of
from ..site import Columns, MapSite, Stream

QKV = ("q", "k", "v")


def part(net: Any, path: str, i: int, n: int) -> Columns:
    """(start, length) of the i-th of n equal parts of what a linear layer gives."""
    layer = net.get_submodule(path)
    width = int(layer.out_features if hasattr(layer, "out_features") else layer.weight.shape[0]) // n
    return i * width, width


def joint_map(address: str, path: str, streams: tuple[Stream, ...], last: str, heads: int, **more: Any) -> MapSite:
    """A map over both streams; only image tokens are kept as queries, and keys are text, then image.

    Args:
        last: the projection that runs last in a forward; the map is complete then.
    """
    return MapSite(address, path, key=last, heads=heads, streams=streams, joint=True, **{"rotary": rope_of} | more)


def split_stream(net: Any, path: str, text: bool) -> Stream:
    """diffusers' separate projections of the text or the image stream."""
    query, key = ("add_q_proj", "add_k_proj") if text else ("to_q", "to_k")
    norms = ("norm_added_q", "norm_added_k") if text else ("norm_q", "norm_k")
    norm_query, norm_key = (norm_at(net, f"{path}.{n}") for n in norms)
    return Stream(f"{path}.{query}", f"{path}.{key}", norm_query=norm_query, norm_key=norm_key)


def fused_stream(net: Any, path: str, norms: tuple[str, str], projection: str = "qkv", width: int = 0) -> Stream:
    """ComfyUI's fused projections of one stream; ``width`` where q, k and v are not all of it."""
    whole = f"{path}.{projection}"
    query, key = ((i * width, width) if width else part(net, whole, i, 3) for i in (0, 1))
    norm_query, norm_key = (norm_at(net, f"{path}.{n}") for n in norms)
    return Stream(whole, whole, query, key, norm_query=norm_query, norm_key=norm_key)


def norm_at(net: Any, path: str) -> str:
    """The path of a norm the model really has, else ""."""
    parent, _, name = path.rpartition(".")
    return path if getattr(net.get_submodule(parent), name, None) is not None else ""
