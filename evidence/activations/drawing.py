"""Tensors as images for this package's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

_COLOURS = (
    (0.93, 0.92, 0.90), (0.96, 0.78, 0.62), (0.35, 0.25, 0.20), (0.60, 0.42, 0.25), (0.16, 0.47, 0.71),
    (0.20, 0.20, 0.20), (0.89, 0.55, 0.42), (0.84, 0.19, 0.25), (0.50, 0.36, 0.65), (0.17, 0.63, 0.45),
    (0.98, 0.80, 0.10),
)  # fmt: skip


def to_pil(image: torch.Tensor) -> Image:
    """An image (3, H, W) in [0, 1], rounded to bytes."""
    from PIL import Image

    return Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def colour_parts(parts: torch.Tensor) -> torch.Tensor:
    """(3, H, W) in [0, 1]: one colour per part index of (H, W)."""
    return torch.tensor(_COLOURS)[parts].permute(2, 0, 1)
