"""Attention maps of joint attention (SD3, Flux): where each image token looks, among text and image tokens.

Queries and keys come from the forward itself: the projections' outputs of both streams, normed and rotated exactly as
the model does it. Text tokens come first among the keys, whichever order the library uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .attention import MapReduction, attention_map
from .reading import columns_of
from .site import MapSite, Stream

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (S, d / 2) of all tokens, text first."""


def rope_of(kwargs: dict[str, Any]) -> Rope | None:
    """The rotary embedding among a block's arguments: diffusers' (cos, sin), or ComfyUI's 2 x 2 matrices."""
    embedding = kwargs.get("image_rotary_emb")
    if embedding is not None:
        cos, sin = embedding
        return cos[:, ::2], sin[:, ::2]  # each angle is stored twice
    matrices = kwargs.get("pe")
    if matrices is None:
        return None
    table = matrices[0, 0]
    return table[..., 0, 0], table[..., 1, 0]


def rotated(x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Rotates neighbouring channels of (B, S, heads, d) by each token's angles (Su et al. 2021, Eq. 34)."""
    if rope is None:
        return x
    cos, sin = (r.to(x.device, torch.float32)[None, :, None] for r in rope)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def joint_map(
    backbone: nn.Module,
    site: MapSite,
    outputs: dict[str, torch.Tensor],
    rope: Rope | None,
    text: int,
    how: MapReduction,
) -> torch.Tensor:
    """(B, heads or 1, image tokens, text + image tokens), or the share of it that ``how`` keeps.

    Args:
        outputs: module path -> the projection's output in this forward.
        text: number of text tokens.
    """

    def read(stream: Stream, path: str, columns: tuple[int, int] | None, norm: str) -> torch.Tensor:
        x = columns_of(outputs[path], columns, site.width).unflatten(-1, (site.heads, -1))
        module: Callable = backbone.get_submodule(norm) if norm else nn.Identity()
        return module(x)

    queries = [read(s, s.query, s.columns, s.norm_query) for s in site.streams]
    keys = [read(s, s.key, s.key_columns, s.norm_key) for s in site.streams]
    q, k = (rotated(torch.cat(streams, 1), rope).flatten(2) for streams in (queries, keys))
    return attention_map(q[:, text:] if site.skip_text else q, k, site.heads, None, how)
