"""Attention maps of transformers whose queries and keys are normalised or rotated.

Queries and keys are the outputs of all streams' projections in the forward, normalised and rotated exactly as the model
does it. In joint attention (SD3, Flux), text tokens come first among the keys in either library. Padding tokens count
in the softmax, but have no row or column in the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..errors import refuse
from ..network.attention import MapReduction, attention_map
from ..network.rotary_embedding import Rope, rotated
from ..network.site import Columns, MapSite, Stream
from ..runtime.compat_torch import module_at
from .reading import ForwardContext, columns_of


def streams_map(
    backbone: nn.Module,
    site: MapSite,
    outputs: dict[str, torch.Tensor],
    rope: Rope | None,
    around: ForwardContext,
    how: MapReduction,
) -> torch.Tensor:
    """(B, heads or 1, queries, keys), or the part of it that ``how`` selects.

    Args:
        outputs: module path -> the projection's output in this forward.
    """
    sizes: list[int] = []

    def read(path: str, columns: Columns | None, norm: str, stream: Stream, size: int) -> torch.Tensor:
        x = columns_of(outputs[path], columns)
        module: Callable = module_at(backbone, norm) if norm else nn.Identity()
        size = size or x.shape[-1] // site.heads
        sizes.append(size)
        heads = (-1, size)
        return module(x).unflatten(-1, heads) if stream.whole_norm else module(x.unflatten(-1, heads))

    queries = torch.cat([read(s.query, s.columns, s.norm_query, s, 0) for s in site.streams], 1)
    keys = torch.cat([read(s.key, s.key_columns, s.norm_key, s, sizes[0]) for s in site.streams], 1)
    q, k = rotated(queries, rope), rotated(keys, rope)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)  # a key head may serve several query heads
    q, k = q.flatten(2), k.flatten(2)
    if not site.joint:
        return attention_map(q, k, site.heads, around.tokens.bias if site.text_keys else None, how)
    image, text = around.rows(site.patch, "tokens"), around.rows(site.patch, "text")
    bias = _bias(around, text, k)
    return attention_map(q[:, image], k, site.heads, bias, _in_sequence(how, text, image, k.shape[1]))


def _bias(around: ForwardContext, text: slice, keys: torch.Tensor) -> torch.Tensor | None:
    """The bias of the text mask over the whole sequence."""
    if around.tokens.bias is None:
        return None
    bias = keys.new_zeros(keys.shape[0], 1, keys.shape[1], dtype=torch.float32)
    bias[:, :, text] = around.tokens.bias.to(bias)
    return bias


def _in_sequence(how: MapReduction, text: slice, image: slice, count: int) -> MapReduction:
    """``how`` with the keys' positions in the sequence; callers count text, then image."""
    if text.start == 0 and image == slice(text.stop, count):
        return how
    order = [*range(text.start, text.stop), *range(image.start, image.stop)]
    wanted = range(len(order)) if how.tokens is None else how.tokens
    if max(wanted) >= len(order):
        raise refuse("map tokens", max(wanted), f"0 .. {len(order) - 1}", "this layer has no such position")
    return replace(how, tokens=tuple(order[i] for i in wanted))
