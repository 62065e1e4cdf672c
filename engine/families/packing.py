"""Packing of latents into tokens, and of encoded prompts into conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import refuse
from ..network.condition import MASK, Condition


def pack(x: torch.Tensor, patch: int = 2) -> torch.Tensor:
    """(B, C, [1,] H, W) -> (B, tokens, C patch^2), in row-major order, channels before the pixels of a patch."""
    b, c, h, w = x.reshape(x.shape[0], x.shape[1], *x.shape[-2:]).shape
    tiles = x.reshape(b, c, h // patch, patch, w // patch, patch)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * patch * patch)


def unpack(tokens: torch.Tensor, like: torch.Tensor, patch: int = 2) -> torch.Tensor:
    """The inverse of :func:`pack`, for latents of ``like``'s shape."""
    b, c, h, w = like.shape[0], like.shape[1], *like.shape[-2:]
    tiles = tokens.reshape(b, h // patch, w // patch, c, patch, patch)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(like.shape)


GRIDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Positions made here -> (height, width), so that the grid is known without synchronising with the device."""


def grid_ids(like: torch.Tensor, patch: int = 2, axes: int = 3) -> torch.Tensor:
    """(tokens, axes) positions (0, row, column, 0 ..) of latents' tokens."""
    h, w = like.shape[-2] // patch, like.shape[-1] // patch
    ids = torch.zeros(h, w, axes, device=like.device)
    ids[..., 1], ids[..., 2] = torch.arange(h, device=like.device)[:, None], torch.arange(w, device=like.device)
    GRIDS[ids] = h, w
    return ids.view(-1, axes)


def video_grid(frames: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(tokens, 3) positions of a video's tokens, from those on each axis."""
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij"), -1).flatten(0, 2)


def video_ids(part: Any, x: torch.Tensor) -> torch.Tensor:
    """(tokens, 3) positions of latents (B, C, T, h, w) in patches of ``part.patch_size``."""
    counts = [side // patch for side, patch in zip(x.shape[-3:], part.patch_size, strict=True)]
    return video_grid(*(torch.arange(n, device=x.device, dtype=torch.float32) for n in counts))


def flow_time(t: torch.Tensor) -> torch.Tensor:
    """Timesteps 0 .. 1000 -> the flow's time 0 (clean) .. 1 (noise)."""
    return t / 1000


def text_of(cond: Condition) -> torch.Tensor:
    """The text states."""
    if cond.text is None:
        raise refuse("condition", "no text", "Condition(text=(B, T, C))", "encode the prompt first")
    return cond.text


def text_length(encoder: Any, usual: int) -> int:
    """The prompt length for an encoder: ``usual``, or its number of positions if that is smaller.

    T5 has no limit; a CLIP text encoder in its place (the flow portraits) has one.
    """
    return min(usual, getattr(getattr(encoder, "config", None), "max_position_embeddings", None) or usual)


def whole(text: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """(B, T, C) and its mask -> the unmasked tokens (N, C) of each batch row."""
    return list(text) if mask is None else [row[keep.bool()] for row, keep in zip(text, mask, strict=True)]


def ragged(rows: Sequence[torch.Tensor]) -> Condition:
    """Prompts of unequal length (N, C) -> one Condition, padded with zeros and masked."""
    text = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=text.device)
    return masked(text, torch.arange(text.shape[1], device=text.device) < lengths[:, None])


def masked(text: torch.Tensor, mask: torch.Tensor | None, pooled: torch.Tensor | None = None) -> Condition:
    """A Condition of text states and their mask, which is left out if it masks nothing."""
    hides = mask is not None and not bool(mask.all())
    return Condition(text, pooled, {MASK: mask.long()} if mask is not None and hides else {})
