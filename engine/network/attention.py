"""Attention probabilities, recomputed from tapped queries and keys, so that the model keeps its fused attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from ..errors import refuse
from ..settings.option import Option, Options

HEADS = ("each", "mean")


@dataclass(frozen=True)
class MapReduction(Options):
    """Which part of an attention map to compute: the full map of a 64 x 64 layer takes 0.5 GiB."""

    heads: Annotated[
        str,
        Option(
            "each keeps the heads apart, mean averages them into one map per layer.",
            choices=HEADS,
            remedy="mean is what GDF's attention features take",
        ),
    ] = "each"
    tokens: Annotated[
        tuple[int, ...] | None,
        Option(
            "The keys to keep, by position (words of a prompt, or image tokens).",
            ge=0,
            unset_doc="all",
        ),
    ] = None
    queries: Annotated[
        tuple[int, ...] | None,
        Option(
            "The queries to compute, by position.",
            ge=0,
            unset_doc="all",
        ),
    ] = None
    memory: Annotated[
        int,
        Option(
            "Bytes for scores and probabilities at a time, in addition to the result.",
            ge=1,
            remedy="2**24 suits most machines",
        ),
    ] = 2**24

    def __post_init__(self) -> None:
        for name in ("tokens", "queries"):
            positions = getattr(self, name)
            if positions is not None:
                object.__setattr__(self, name, tuple(int(i) for i in positions))
        super().__post_init__()

    def _check(self) -> None:
        """None keeps all; an empty list keeps nothing."""
        for name in ("tokens", "queries"):
            if getattr(self, name) == ():
                raise refuse(f"map {name}", (), "positions from 0, at least one, or None", "None keeps all")


WHOLE = MapReduction()


def attention_map(
    query: torch.Tensor, key: torch.Tensor, heads: int, bias: torch.Tensor | None = None, how: MapReduction = WHOLE
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) (Vaswani et al. 2017, eq. 1), one head and some queries at a time, in float32.

    Args:
        query: (B, Q, heads d).
        key: (B, K, heads d).
        bias: (B, 1, K), added to the scores of every head, or None.

    Returns:
        (B, heads or 1, Q or chosen, K or chosen) in the query's dtype.
    """
    for name, positions, count in (("tokens", how.tokens, key.shape[1]), ("queries", how.queries, query.shape[1])):
        if positions is not None and max(positions) >= count:
            raise refuse(f"map {name}", max(positions), f"0 .. {count - 1}", "this layer has no such position")
    if how.queries is not None:
        query = query[:, list(how.queries)]
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
    wide = torch.promote_types(q.dtype, torch.float32)
    chosen = list(how.tokens) if how.tokens is not None else slice(None)
    mean = how.heads == "mean"
    (batch, _, count, _), width = q.shape, len(how.tokens or range(key.shape[1]))
    maps = query.new_empty(batch, 1 if mean else heads, count, width)
    shift = 0 if bias is None else bias.to(q.device, wide)
    step = max(1, how.memory // (3 * batch * key.shape[1] * wide.itemsize))  # scores, probabilities, running mean
    for start in range(0, count, step):
        part = slice(start, start + step)
        total = torch.zeros(batch, len(range(count)[part]), width, device=q.device, dtype=wide) if mean else None
        for h in range(heads):
            scores = (q[:, h, part] * q.shape[-1] ** -0.5).to(wide) @ k[:, h].to(wide).transpose(1, 2)
            part_map = (scores + shift).softmax(-1)[..., chosen]
            if total is None:
                maps[:, h, part] = part_map.to(query.dtype)
            else:
                total += part_map / heads
        if total is not None:
            maps[:, 0, part] = total.to(query.dtype)
    return maps


def normed(attention: nn.Module, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k after the module's qk-norm (``norm_q``, ``norm_k``) if it has one; (B, N, heads d) in and out."""
    norm = getattr(attention, name, None)
    return tensor if norm is None else norm(tensor.unflatten(-1, (heads, -1))).flatten(-2)


def text_bias(mask: Any) -> torch.Tensor | None:
    """diffusers' ``encoder_attention_mask`` as a score bias (B, 1, K): a 0/1 mask (B, K), or already a bias."""
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.ndim == 2:
        return ((1 - mask.float()) * -10000.0)[:, None]  # the constant in diffusers
    return mask
