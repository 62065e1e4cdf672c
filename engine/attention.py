"""Attention probabilities recomputed from tapped queries and keys, so the model's own fused attention stays in use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def attention_map(
    query: torch.Tensor, key: torch.Tensor, heads: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) (Vaswani et al. 2017, eq. 1), one head at a time; softmax in float32 at least.

    Args:
        query: (B, Q, heads d).
        key: (B, K, heads d).
        bias: (B, 1, K), added to the scores of every head, or None.

    Returns:
        (B, heads, Q, K) in the query's dtype.
    """
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
    scale, wide = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
    shift = 0 if bias is None else bias.to(q.device, wide)
    parts = [((q[:, h] * scale).to(wide) @ k[:, h].to(wide).transpose(1, 2) + shift).softmax(-1) for h in range(heads)]
    return torch.stack(parts, 1).to(query.dtype)


def normed(attention: nn.Module, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k after the attention's qk-norm (``norm_q``, ``norm_k``) where it has one; (B, N, heads d) both ways."""
    norm = getattr(attention, name, None)
    return tensor if norm is None else norm(tensor.unflatten(-1, (heads, -1))).flatten(-2)


def text_bias(mask: Any) -> torch.Tensor | None:
    """diffusers' ``encoder_attention_mask`` as a score bias (B, 1, K): a 0/1 mask (B, K), or a bias already."""
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.ndim == 2:
        return ((1 - mask.float()) * -10000.0)[:, None]  # the constant diffusers uses
    return mask
