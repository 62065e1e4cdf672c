"""Rotary embeddings for another grid, as functions on inverse frequencies and on token ids. Not in Berrada et al."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import refuse
from ..schedule import wide

ROPE_MODES = ("rope_pi", "rope_ntk", "rope_yarn")


def inverse_frequencies(dim: int, theta: float = 10000.0) -> torch.Tensor:
    """(dim / 2,) float64: theta^(-2i/dim) (Su et al. 2021).

    Raises:
        VitrineError: If the width is odd or below 2.
    """
    if dim < 2 or dim % 2:
        raise refuse("rotary axis width", dim, "an even number", "check axes_dim")
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def scaled_ids(ids: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Position interpolation on token ids (..., axes): each axis divided by its scale = new tokens / trained tokens."""
    # Chen et al. 2023 (Position Interpolation): f'(x, m) = f(x, m L / L')
    return ids / torch.as_tensor(scales, dtype=ids.dtype, device=ids.device)


def interpolated(inverse: torch.Tensor, scale: float) -> torch.Tensor:
    """Position interpolation on frequencies, equal to that on ids."""
    return inverse / scale


def ntk(dim: int, theta: float, scale: float) -> torch.Tensor:
    """NTK-aware frequencies: the lowest is stretched by ``scale``, the highest stays."""
    if dim < 4:
        return inverse_frequencies(dim, theta)  # one frequency only, the highest
    # bloc97 2023: theta' = theta scale^(d / (d - 2))
    return inverse_frequencies(dim, theta * scale ** (dim / (dim - 2)))


def yarn(dim: int, theta: float, scale: float, length: int, fast: float = 32.0, slow: float = 1.0) -> torch.Tensor:
    """NTK-by-parts: frequencies with over ``fast`` turns within the trained length stay, under ``slow`` are stretched.

    Args:
        length: trained tokens along the axis.
    """
    inverse = inverse_frequencies(dim, theta)
    # Peng et al. 2023 (YaRN), Eqs. 19-20: h = (1 - g) omega / s + g omega, g a ramp in r = L omega / 2 pi
    turns = length * inverse / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return (1 - keep) * inverse / scale + keep * inverse


def yarn_scale(scale: float) -> float:
    """The factor YaRN puts on cosines and sines, hence squared on attention logits; 1 for smaller grids."""
    # Peng et al. 2023 (YaRN), Eq. 22: sqrt(1 / t) = 0.1 ln s + 1
    return 0.1 * math.log(max(scale, 1.0)) + 1.0


def axis_frequencies(mode: str, dim: int, theta: float, scale: float, length: int) -> torch.Tensor:
    """(dim / 2,) frequencies of one axis under a mode.

    Raises:
        VitrineError: If the mode is unknown.
    """
    if mode == "rope_pi":
        return interpolated(inverse_frequencies(dim, theta), scale)
    if mode == "rope_ntk":
        return ntk(dim, theta, scale)
    if mode == "rope_yarn":
        return yarn(dim, theta, scale, length)
    raise refuse("rotary mode", mode, ROPE_MODES, "rope_pi keeps positions within the trained range")


def axis_angles(
    ids: torch.Tensor, dims: Sequence[int], theta: float, mode: str, scales: Sequence[float], lengths: Sequence[int]
) -> tuple[list[torch.Tensor], float]:
    """([(..., dim / 2) float64 angles of each axis], factor on cosines and sines).

    Args:
        ids: (..., axes) positions; the last two axes are rows and columns, those before them stay as they are.
        dims: width of each axis.
        scales, lengths: new / trained tokens, and trained tokens, of rows and columns.
    """
    before = len(dims) - 2
    angles = []
    for axis, dim in enumerate(dims):
        k = axis - before
        inverse = inverse_frequencies(dim, theta)
        if k >= 0:
            inverse = axis_frequencies(mode, dim, theta, scales[k], lengths[k])
        positions = wide(ids[..., axis, None])
        angles.append(positions * inverse.to(positions))
    return angles, yarn_scale(max(scales)) if mode == "rope_yarn" else 1.0
