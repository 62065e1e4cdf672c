"""Low-rank approximation of a LoRA's weight update, and the fraction that it keeps."""

from __future__ import annotations

import torch

from ...io.lora_layer import Lora, LoraLayer

SMALL = 512
"""Largest side of matrices that are fully decomposed; of larger ones only leading singular vectors are computed."""
PROBE = 128
"""Rank that is tried for a large update before it is kept as a full matrix."""


def refactor(layer: LoraLayer, rank: int | None = None, tolerance: float = 1e-6) -> LoraLayer:
    """The best approximation of the weight update with rank at most ``rank``; the result has alpha = rank.

    With ``rank`` None the update is exact: small layers drop singular values below ``tolerance`` of the largest; a
    large one (see ``SMALL``) becomes a full matrix times the identity, unless rank ``PROBE`` suffices, since a
    decomposition would take seconds per layer.
    """
    down, up = layer.down.flatten(1).double(), layer.up.flatten(1).double() * layer.scale
    shape = layer.down.shape[1:]  # (in,), or (in, k, k) of a convolution
    new_up, new_down = _factors(up, down, rank, tolerance)
    up_shape = (-1, new_up.shape[1], *[1] * (len(shape) - 1))
    return LoraLayer(new_down.float().reshape(-1, *shape), new_up.float().view(up_shape), float(len(new_down)))


def factored(change: torch.Tensor, shape: torch.Size, rank: int | None = None, tolerance: float = 1e-6) -> LoraLayer:
    """:func:`refactor` of a given update (out, in), float64.

    Args:
        shape: shape of its input side, (in,) or (in, k, k).
    """
    up, down = _of_change(change, rank, tolerance)
    up_shape = (-1, up.shape[1], *[1] * (len(shape) - 1))
    return LoraLayer(down.float().reshape(-1, *shape), up.float().view(up_shape), float(len(down)))


def _factors(
    up: torch.Tensor, down: torch.Tensor, rank: int | None, tolerance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, r), (r, in) with the product of (out, R), (R, in), or its best approximation of that rank."""
    if 2 * len(down) <= min(len(up), down.shape[1]):  # fewer factors than rows: decompose the small matrix between them
        q_up, r_up = torch.linalg.qr(up)
        q_down, r_down = torch.linalg.qr(down.T)
        inner_up, inner_down = _factors(r_up, r_down.T, rank, tolerance)
        return q_up @ inner_up, inner_down @ q_down.T
    return _of_change(up @ down, rank, tolerance)


def _of_change(change: torch.Tensor, rank: int | None, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    target = rank or (min(change.shape) if min(change.shape) <= SMALL else PROBE)
    vectors, strengths = _leading(change, min(target, *change.shape))
    if rank is None and min(change.shape) > SMALL:
        missing = change - vectors @ (vectors.T @ change)
        if missing.norm() > tolerance * change.norm():
            identity = torch.eye(min(change.shape), dtype=change.dtype)
            return (identity, change) if len(change) <= change.shape[1] else (change, identity)
    kept = strengths > tolerance * strengths[0].clamp_min(1e-300) if rank is None else strengths > -1
    kept[0] = True
    vectors, root = vectors[:, kept], strengths[kept].clamp_min(1e-300).sqrt()
    return vectors * root, vectors.T @ change / root[:, None]


def _leading(change: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left singular vectors (out, count) and singular values (count,) of a matrix, largest first."""
    if min(change.shape) <= SMALL:
        u, s, _ = torch.linalg.svd(change, full_matrices=False)
        return u[:, :count], s[:count]
    # Halko et al. 2011, Algorithm 4.4: subspace iteration from random vectors
    random = torch.Generator().manual_seed(0)
    width = min(count + 16, *change.shape)
    basis = torch.randn(change.shape[1], width, generator=random, dtype=change.dtype)
    basis = torch.linalg.qr(change @ basis)[0]
    for _ in range(4):
        basis = torch.linalg.qr(change @ (change.T @ basis))[0]
    u, s, _ = torch.linalg.svd(basis.T @ change, full_matrices=False)
    return basis @ u[:, :count], s[:count]


def fraction_kept(whole: Lora, part: Lora) -> float:
    """The fraction, 0 .. 1, of a LoRA's squared update that a re-factored one keeps, over all layers."""
    return min(1.0, squared_change(part) / max(squared_change(whole), 1e-300))


def squared_change(lora: Lora) -> float:
    """|BA|^2 over all layers: sum((B^T B) * (A A^T)), or of the product itself if that is smaller."""
    total = 0.0
    for layer in lora.values():
        down, up = layer.down.flatten(1).double(), layer.up.flatten(1).double() * layer.scale
        small = len(down) < min(len(up), down.shape[1])
        total += float(((up.T @ up) * (down @ down.T)).sum() if small else (up @ down).square().sum())
    return total
