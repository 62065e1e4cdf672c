"""Pictures side by side."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def tile(pictures: torch.Tensor, columns: int = 4) -> torch.Tensor:
    """(B, 3, H, W) in [0, 1] side by side, ``columns`` per row: (rows H, columns W, 3) uint8; empty cells are black."""
    count, _, height, width = pictures.shape
    rows = -(-count // columns)
    cells = pad(pictures, (0, 0, 0, 0, 0, 0, 0, rows * columns - count))
    grid = cells.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    return (grid.reshape(rows * height, columns * width, 3).clamp(0, 1) * 255).round().byte().cpu()
