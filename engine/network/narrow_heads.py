"""Attention of small maps and narrow heads on the CPU, as plain matrix products; forward and backward.

PyTorch's fused CPU kernel computes blocks whose products are as thin as a head is wide, which is slow for the eight
channels of a small model's heads. Products over many maps at once, with the long axis innermost, take less than half
the time. For wide heads, or maps larger than the cache, the fused kernel is faster and is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..runtime.compat_torch import softmax_backward

WIDEST = 24
"""Most channels per head (measured: 8 and 24 are faster, 32 and more are not)."""
LARGEST = 256 * 256
"""Most entries per map: larger maps leave the cache between two products."""
FEWEST = 32
"""Fewest maps per call."""
PIECE = 2**17
"""Entries processed at a time: half a MiB, so that they stay in a core's cache."""


class NarrowHeads(TorchFunctionMode):
    """While open, computes attention by plain products where the fused CPU kernel is slow.

    This applies to float32 calls without mask, dropout or causal order that need a gradient; other calls are unchanged.
    The result is as exact as the fused kernel's, but differs in its last bits.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and _suits(*args, **kwargs):
            query, key, value, *_ = (*args, *(kwargs[n] for n in ("query", "key", "value") if n in kwargs))
            scale = kwargs.get("scale")
            return _Attention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        return func(*args, **kwargs)


def _suits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> bool:  # fmt: skip
    if attn_mask is not None or dropout_p or is_causal or enable_gqa or not torch.is_grad_enabled():
        return False
    tensors = (query, key, value)
    if not any(x.requires_grad for x in tensors) or any(x.dtype != torch.float32 for x in tensors):
        return False
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.shape[-1] == value.shape[-1] <= WIDEST
    small = query.shape[-2] * key.shape[-2] <= LARGEST and query.shape[:-2].numel() >= FEWEST
    return same and small and query.device.type == "cpu"


class _Attention(torch.autograd.Function):
    """P = softmax(scale Q K^T), O = P V, for n maps; every operand is kept as (n, d, l), tokens innermost."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        qt, kt, vt = (_transposed(x) for x in (q, k, v))
        qt = qt * scale
        p, out = qt.new_empty(len(qt), q.shape[-2], k.shape[-2]), torch.empty_like(qt)
        for j in _pieces(p):
            torch.bmm(qt[j].mT, kt[j], out=p[j])
            torch.softmax(p[j], -1, out=p[j])
            torch.bmm(vt[j], p[j].mT, out=out[j])
        ctx.save_for_backward(qt, kt, vt, p)
        ctx.scale, ctx.lead = scale, q.shape[:-2]
        return out.unflatten(0, ctx.lead).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ = scale dS K, dK = dS^T (scale Q)."""
        qt, kt, vt, p = ctx.saved_tensors
        ot = _transposed(grad)
        dq, dk, dv = (torch.empty_like(x) for x in (qt, kt, vt))
        for j in _pieces(p):
            torch.bmm(ot[j], p[j], out=dv[j])
            ds = torch.bmm(ot[j].mT, vt[j])
            softmax_backward(ds, p[j])
            torch.bmm(kt[j], ds.mT, out=dq[j])
            if ctx.needs_input_grad[1]:  # false where the keys come from a frozen text encoder
                torch.bmm(qt[j], ds, out=dk[j])
        dq *= ctx.scale
        return *(x.unflatten(0, ctx.lead).mT for x in (dq, dk, dv)), None


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """(..., l, d) -> (n, d, l), contiguous."""
    return x.mT.reshape(-1, x.shape[-1], x.shape[-2])


def _pieces(maps: torch.Tensor) -> list[slice]:
    """Slices of consecutive maps that fit in the cache together."""
    step = max(1, PIECE // maps[0].numel())
    return [slice(i, i + step) for i in range(0, len(maps), step)]
