"""Sample grids written while a student trains."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import pad

from ..io.files import write_whole


def tile(pictures: torch.Tensor, columns: int = 4) -> torch.Tensor:
    """(B, 3, H, W) in [0, 1] side by side, ``columns`` per row: (rows H, columns W, 3) uint8; empty cells are black."""
    count, _, height, width = pictures.shape
    rows = -(-count // columns)
    cells = pad(pictures, (0, 0, 0, 0, 0, 0, 0, rows * columns - count))
    grid = cells.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    return (grid.reshape(rows * height, columns * width, 3).clamp(0, 1) * 255).round().byte().cpu()


def write_grid(path: str | Path, pictures: torch.Tensor, columns: int = 4) -> Path:
    """Writes :func:`tile` as a PNG, atomically."""
    from PIL import Image

    grid = Image.fromarray(tile(pictures, columns).numpy())
    return write_whole(path, lambda scratch: grid.save(scratch, format="PNG"))
