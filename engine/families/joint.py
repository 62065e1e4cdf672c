"""What transformers with joint attention share: one map a block, over text and image tokens."""

from __future__ import annotations

from typing import Any

from ..site import MapSite, Stream

QKV = ("q", "k", "v")


def joint_map(address: str, path: str, streams: tuple[Stream, ...], last: str, heads: int, **more: Any) -> MapSite:
    """A map over both streams, text first; only image tokens are kept as queries.

    Args:
        last: the projection that runs last in a forward; the map is complete then.
    """
    return MapSite(address, path, key=last, heads=heads, streams=streams, skip_text=True, **more)


def split_stream(net: Any, path: str, text: bool) -> Stream:
    """diffusers' separate projections of the text or the image stream."""
    query, key = ("add_q_proj", "add_k_proj") if text else ("to_q", "to_k")
    norms = ("norm_added_q", "norm_added_k") if text else ("norm_q", "norm_k")
    norm_query, norm_key = (_norm(net, f"{path}.{n}") for n in norms)
    return Stream(f"{path}.{query}", f"{path}.{key}", norm_query=norm_query, norm_key=norm_key)


def fused_stream(net: Any, path: str, norms: tuple[str, str], projection: str = "qkv") -> Stream:
    """ComfyUI's fused projections of one stream."""
    whole = f"{path}.{projection}"
    norm_query, norm_key = (_norm(net, f"{path}.{n}") for n in norms)
    return Stream(whole, whole, (0, 3), (1, 3), norm_query=norm_query, norm_key=norm_key)


def _norm(net: Any, path: str) -> str:
    """The path of a norm the model really has, else ""."""
    parent, _, name = path.rpartition(".")
    return path if getattr(net.get_submodule(parent), name, None) is not None else ""
