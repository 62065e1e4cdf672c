"""The sites of a block with self-attention followed by cross-attention to the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..network.site import AdaLN, MapSite, ModuleSite, Site, Stream
from .joint import QKV, block_input


@dataclass(frozen=True)
class CrossBlock:
    """The modules of a block; paths are relative to the block.

    Attributes:
        attentions: self- and cross-attention.
        projections, norms, out: inside each attention: q, k, v; the norms of q and k; the output projection.
        mlp, mlp_in: the MLP, and the module whose input is its inner activation.
        heads: of both attentions.
        rotary: finds the rotary embedding among self-attention's arguments.
        whole_norm: the norms act on all heads together.
        patch: latent pixels per token.
        element: index into the block's output if that is a tuple.
        norm: the norm before self-attention, whose input is the block's, or "" if it is not a site.
        adaln: path -> how the block at it modulates that norm.
    """

    attentions: tuple[str, str]
    projections: tuple[str, str, str]
    norms: tuple[str, str]
    out: str
    mlp: str
    mlp_in: str
    heads: int
    rotary: Callable[[tuple, dict[str, Any]], Any]
    whole_norm: bool = False
    patch: int = 2
    element: int | None = None
    norm: str = ""
    adaln: Callable[[str], AdaLN] = AdaLN


def cross_block(name: str, path: str, block: CrossBlock) -> Iterator[Site]:
    """``-in``, ``-self-q`` .. ``-self-out``, ``-cross-q`` .. ``-cross-out``, ``-ffn-inner``, ``-ffn-out``, ``-out``."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": block.patch}
    if block.norm:
        yield block_input(name, f"{path}.{block.norm}", block.adaln(path), **image)
    for prefix, attention in zip(("self", "cross"), block.attentions, strict=True):
        where, text = f"{path}.{attention}", prefix == "cross"
        for x, projection in zip(QKV, block.projections, strict=True):
            of: dict[str, Any] = {"kind": "text"} if text and x != "q" else image
            yield ModuleSite(f"{name}-{prefix}-{x}", f"{where}.{projection}", **of)
        query, key, _ = (f"{where}.{p}" for p in block.projections)
        norm_query, norm_key = (f"{where}.{n}" for n in block.norms)
        streams = (Stream(query, key, None, None, norm_query, norm_key, block.whole_norm),)
        turned: dict[str, Any] = {} if text else {"rope": where, "rotary": block.rotary}
        more: dict[str, Any] = {"heads": block.heads, "streams": streams, "text_keys": text, "patch": block.patch}
        yield MapSite(f"{name}-{prefix}-map", where, query, key, **more, **turned)
        yield ModuleSite(f"{name}-{prefix}-out", f"{where}.{block.out}", **image)
    yield ModuleSite(f"{name}-ffn-inner", f"{path}.{block.mlp_in}", before=True, **image)
    yield ModuleSite(f"{name}-ffn-out", f"{path}.{block.mlp}", **image)
    yield ModuleSite(f"{name}-out", path, element=block.element, **image)
