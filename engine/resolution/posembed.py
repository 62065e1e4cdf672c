"""Positional embeddings for another grid: sin-cos tables rebuilt, stored tables recovered.

Extrapolation keeps the step and extends the range; grid resampling keeps the limits and reduces the step (Berrada et
al. 2024, section 2.2). Sizes here are (height, width) in tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import refuse

TABLE_ERROR = 2e-3
"""Largest error of a recovered grid against the stored table; float16 tables have 5e-4."""

Grid = tuple[int, int]


def axis_units(count: int, base: int, mode: str = "grid", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(count,) positions in units of the training step, where ``base`` tokens were trained.

    Args:
        mode: ``grid`` keeps the limits, [0, base), as PixArt and diffusers do; ``extrapolate`` keeps the step.
    """
    if mode not in ("grid", "extrapolate"):
        raise refuse("positions", mode, "grid or extrapolate", "use grid")
    if count < 1 or base < 1:
        raise refuse("tokens", (count, base), "1 or more", "check the sizes: they are smaller than one patch")
    i = torch.arange(count, dtype=dtype)
    # Berrada et al. 2024, App. C (read as in PixArt-sigma's code): p_i = i base / N
    return i if mode == "extrapolate" else i / (count / base)


def grid_units(
    target: Grid, train: Grid, mode: str = "grid", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of both axes, (rows,) and (columns,); ``grid`` fills the trained range on each."""
    rows, columns = (axis_units(n, base, mode, dtype) for n, base in zip(target, train, strict=True))
    return rows, columns


def sincos_table(dim: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(1, H W, dim) float64 table: sines and cosines of the column, then of the row, as in MAE, DiT and SD3."""
    if dim < 4 or dim % 4:
        raise refuse("embedding width", dim, "a multiple of 4", "two axes, a sine and a cosine each")
    across = columns.repeat(len(rows))
    down = rows.repeat_interleave(len(columns))
    return torch.cat([_sincos(dim // 2, across), _sincos(dim // 2, down)], 1)[None]


def rebuilt_table(dim: int, target: Grid, train: Grid, mode: str = "grid", scale: float = 1.0) -> torch.Tensor:
    """(1, H W, dim) float32 table of a model that computes its positions (PixArt).

    Equals diffusers' ``get_2d_sincos_pos_embed(base_size=train)`` bit for bit with grid.

    Args:
        scale: the model's ``interpolation_scale``; positions are divided by it.
    """
    rows, columns = grid_units(target, train, mode)
    return sincos_table(dim, rows / scale, columns / scale).float()


# --- tables stored in a checkpoint ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredGrid:
    """The grid of a stored square sin-cos table: position of token i on an axis = start + step i.

    Attributes:
        starts, steps: of rows and of columns.
        size: tokens per side.
        dim: embedding width.
    """

    starts: tuple[float, float]
    steps: tuple[float, float]
    size: int
    dim: int

    def table(self, target: Grid, train: Grid, mode: str = "grid") -> torch.Tensor:
        """(1, H W, dim) float64 table for ``target`` tokens of a model trained on the central ``train`` tokens.

        ``extrapolate`` is SD3's own centre crop, continued beyond the table; ``grid`` keeps the limits of the training
        crop.
        """
        axes = []
        units = grid_units(target, train, mode, torch.float64)
        for axis, unit in enumerate(units):
            wide = target[axis] if mode == "extrapolate" else train[axis]
            first = (self.size - wide) // 2
            axes.append(self.starts[axis] + self.steps[axis] * (first + unit))
        return sincos_table(self.dim, *axes)


def recover_grid(table: torch.Tensor) -> StoredGrid:
    """Start and step of a stored table (1, N N, D) or (N N, D), from its sines and cosines."""
    flat = table.detach().cpu().reshape(-1, table.shape[-1])
    size, dim = math.isqrt(len(flat)), flat.shape[-1]
    if size * size != len(flat) or size < 2 or dim % 4:
        raise refuse("stored position table", tuple(table.shape), "(1, N N, D) with D a multiple of 4", "use keep")
    image = flat.reshape(size, size, dim)
    fits = [_line(_unwrapped(values.double())) for values in (image[:, 0, dim // 2 :], image[0, :, : dim // 2])]
    grid = StoredGrid((fits[0][0], fits[1][0]), (fits[0][1], fits[1][1]), size, dim)
    error = _misfit(image, grid)
    if not error < TABLE_ERROR:
        misfit = f"a table that a sin-cos grid misses by {error:.2g}"
        remedy = "it may be learned: use keep"
        raise refuse("stored position table", misfit, f"at most {TABLE_ERROR}", remedy)
    return grid


def _unwrapped(values: torch.Tensor) -> torch.Tensor:
    """(N,) positions from (N, 2F) sines and cosines: low frequencies determine the turn, high ones the value."""
    half = values.shape[-1] // 2
    phase = torch.atan2(values[:, :half], values[:, half:])
    omega = _omega(2 * half)
    position, total = phase[:, -1] / omega[-1], torch.zeros(len(values), dtype=torch.float64)
    for k in reversed(range(half)):
        turns = torch.round((position * omega[k] - phase[:, k]) / (2 * math.pi))
        whole = phase[:, k] + 2 * math.pi * turns
        position = whole / omega[k]
        total += whole * omega[k]
    return total / omega.square().sum()  # least squares over all frequencies averages out the rounding of the table


def _misfit(image: torch.Tensor, grid: StoredGrid) -> float:
    """Largest difference of a stored (N, N, D) table from its recovered grid; by rows: SD3's has 57 million."""
    i, half = torch.arange(grid.size, dtype=torch.float64), grid.dim // 2
    down, across = (_sincos(half, start + step * i) for start, step in zip(grid.starts, grid.steps, strict=True))
    errors = [
        torch.maximum((row[:, :half] - across).abs().max(), (row[:, half:] - d).abs().max())
        for row, d in zip(image, down, strict=True)
    ]
    return float(torch.stack(errors).max())


def _line(positions: torch.Tensor) -> tuple[float, float]:
    """(start, step) of the line through positions at 0, 1, 2, ..."""
    i = torch.arange(len(positions), dtype=torch.float64)
    centred = i - i.mean()
    step = float((centred * positions).sum() / centred.square().sum())
    return float(positions.mean()) - step * float(i.mean()), step


def _omega(dim: int) -> torch.Tensor:
    omega = torch.arange(dim // 2, dtype=torch.float64)
    omega /= dim / 2.0
    return 1.0 / 10000**omega


def _sincos(dim: int, positions: torch.Tensor) -> torch.Tensor:
    angle = torch.outer(positions, _omega(dim))
    return torch.cat([torch.sin(angle), torch.cos(angle)], 1)
