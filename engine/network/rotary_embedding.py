"""Rotary position embeddings in each library's format, and their application to queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rope(NamedTuple):
    """Cosines and sines (S, d / 2) or (B, S, d / 2) of all tokens in the order of the sequence.

    ``halves``: channel i turns with channel i + d / 2, not with its neighbour.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    halves: bool = False


def rope_of(args: tuple, kwargs: dict[str, Any]) -> Rope | None:
    """The rotary embedding among a Flux block's arguments: diffusers' (cos, sin), or ComfyUI's 2 x 2 matrices."""
    embedding = kwargs.get("image_rotary_emb")
    if embedding is not None:
        cos, sin = embedding
        return Rope(cos[:, ::2], sin[:, ::2])  # each angle is stored twice
    matrices = kwargs.get("pe")
    return None if matrices is None else matrix_rope(matrices)


def matrix_rope(matrices: torch.Tensor) -> Rope:
    """ComfyUI's table (B or 1, ..., S, ..., d / 2, 2, 2) with singleton axes for the heads, for one row or all."""
    table = matrices[0].reshape(-1, *matrices.shape[-3:])
    return Rope(table[..., 0, 0], table[..., 1, 0])


def complex_rope(table: torch.Tensor) -> Rope:
    """diffusers' complex numbers (S, d / 2) or (B, S, d / 2)."""
    return Rope(table.real, table.imag)


def doubled(angles: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines) float32 of angles (..., d / 2), times a factor, each angle twice (diffusers' Flux, Wan)."""
    wide = angles.repeat_interleave(2, -1)
    return (factor * wide.cos()).float(), (factor * wide.sin()).float()


def turns(angles: torch.Tensor, factor: float) -> torch.Tensor:
    """(..., 2, 2) float32 rotations by angles of any shape, times a factor: as in Flux's own code."""
    rotation = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1) * factor
    return rotation.reshape(*angles.shape, 2, 2).float()


def rotated(x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Rotates pairs of channels of (B, S, heads, d) by each token's angles (Su et al. 2021, Eq. 34)."""
    if rope is None:
        return x
    tables = (r if r.ndim == 3 else r[None] for r in rope[:2])
    cos, sin = (r.to(x.device, torch.float32)[:, :, None] for r in tables)
    a, b = x.float().chunk(2, -1) if rope.halves else x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = a * cos - b * sin, a * sin + b * cos
    return (torch.cat(turned, -1) if rope.halves else torch.stack(turned, -1).flatten(-2)).to(x.dtype)
