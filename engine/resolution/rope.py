"""Rotary embeddings for another grid, as functions of inverse frequencies and of token ids. Not in Berrada et al."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..diffusion.schedule import wide
from ..errors import refuse

DYNAMIC = "_dynamic"
ROPE_MODES = ("rope_pi", "rope_ntk", "rope_yarn", "rope_pi_dynamic", "rope_ntk_dynamic", "rope_yarn_dynamic")
PATENT = "positions that follow the timestep are DyPE's (Issachar et al. 2025); its authors say: patent pending"
_LEAST = 1e-6
"""Thresholds without noise: not 0, since turns are divided by them."""


def inverse_frequencies(dim: int, theta: float = 10000.0) -> torch.Tensor:
    """(dim / 2,) float64: theta^(-2i/dim) (Su et al. 2021)."""
    if dim < 2 or dim % 2:
        raise refuse("rotary axis width", dim, "an even number", "check axes_dim")
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def interpolated(inverse: torch.Tensor, scale: float) -> torch.Tensor:
    """Position interpolation on frequencies, which equals that on token ids."""
    # Chen et al. 2023 (Position Interpolation): f'(x, m) = f(x, m L / L')
    return inverse / scale


def ntk(dim: int, theta: float, scale: float) -> torch.Tensor:
    """NTK-aware frequencies: the lowest is stretched by ``scale``, the highest is unchanged."""
    if dim < 4:
        return inverse_frequencies(dim, theta)  # one frequency only, the highest
    # bloc97 2023: theta' = theta scale^(d / (d - 2))
    return inverse_frequencies(dim, theta * scale ** (dim / (dim - 2)))


def yarn(dim: int, theta: float, scale: float, length: int, fast: float = 32.0, slow: float = 1.0) -> torch.Tensor:
    """NTK-by-parts: keeps frequencies with over ``fast`` turns in the trained length, stretches those under ``slow``.

    Args:
        length: trained tokens along the axis.
    """
    inverse = inverse_frequencies(dim, theta)
    # Peng et al. 2023 (YaRN), Eqs. 19-20: h = (1 - g) omega / s + g omega, g a ramp in r = L omega / 2 pi
    turns = length * inverse / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return (1 - keep) * inverse / scale + keep * inverse


def yarn_scale(scale: float) -> float:
    """YaRN's factor on cosines and sines, hence squared on attention logits; 1 for smaller grids."""
    # Peng et al. 2023 (YaRN), Eq. 22: sqrt(1 / t) = 0.1 ln s + 1
    return 0.1 * math.log(max(scale, 1.0)) + 1.0


def axis_frequencies(mode: str, dim: int, theta: float, scale: float, length: int, tau: float = 1.0) -> torch.Tensor:
    """(dim / 2,) frequencies of one axis under a mode.

    Args:
        tau: fraction of noise, 1 .. 0, for the dynamic modes: as it falls, the trained frequencies return.
    """
    if mode not in ROPE_MODES:
        raise refuse("rotary mode", mode, ROPE_MODES, "rope_pi keeps positions within the trained range")
    if mode.endswith(DYNAMIC):
        return _dynamic(mode.removesuffix(DYNAMIC), dim, theta, scale, length, tau)
    if mode == "rope_pi":
        return interpolated(inverse_frequencies(dim, theta), scale)
    if mode == "rope_ntk":
        return ntk(dim, theta, scale)
    return yarn(dim, theta, scale, length)


def _dynamic(mode: str, dim: int, theta: float, scale: float, length: int, tau: float) -> torch.Tensor:
    """A dynamic mode, fading to the trained frequencies; an axis that is not longer than trained is unchanged."""
    if scale <= 1:
        return inverse_frequencies(dim, theta)
    # Issachar et al. 2025 (DyPE): kappa(t) = lambda_s t^lambda_t with lambda_t = 2; lambda_s is 2 for NTK, 1 for YaRN,
    # and, our choice, 1 for PI: at full noise it then equals the static mode.
    # The noise level to six digits: the libraries pass it in float32 and differ beyond that.
    kappa = round(tau, 6) ** 2
    if mode == "rope_pi":
        return interpolated(inverse_frequencies(dim, theta), scale**kappa)
    if mode == "rope_ntk":
        return ntk(dim, theta, scale ** (2 * kappa))
    ramp = max(kappa, _LEAST)
    return yarn(dim, theta, scale, length, 32.0 * ramp, ramp)


def frequencies(
    dims: Sequence[int],
    thetas: Sequence[float],
    mode: str,
    scales: Sequence[float],
    lengths: Sequence[int],
    tau: float = 1.0,
) -> tuple[list[torch.Tensor], float]:
    """([(dim / 2,) frequencies of each axis], factor on cosines and sines).

    Args:
        dims, thetas: width and base of each axis; rows and columns are the second and third, or both of two. Time and
            indices of references and text, the other axes, are unchanged.
        scales, lengths: new / trained tokens, and trained tokens, of rows and columns.
        tau: as in :func:`axis_frequencies`.
    """
    rows = min(1, len(dims) - 2)
    made = [inverse_frequencies(dim, theta) for dim, theta in zip(dims, thetas, strict=True)]
    for k in range(2):
        made[rows + k] = axis_frequencies(mode, dims[rows + k], thetas[rows + k], scales[k], lengths[k], tau)
    return made, yarn_scale(max(scales)) if mode.startswith("rope_yarn") else 1.0


def axis_angles(
    ids: torch.Tensor,
    dims: Sequence[int],
    theta: float | Sequence[float],
    mode: str,
    scales: Sequence[float],
    lengths: Sequence[int],
    tau: float = 1.0,
) -> tuple[list[torch.Tensor], float]:
    """([(..., dim / 2) float64 angles of each axis], factor on cosines and sines).

    Args:
        ids: (..., axes) positions.
        dims, theta: width and base of each axis, as for :func:`frequencies`; one base may be shared.
        scales, lengths, tau: as there.
    """
    thetas = (theta,) * len(dims) if isinstance(theta, (int, float)) else theta
    scaled, factor = frequencies(dims, thetas, mode, scales, lengths, tau)
    positions = wide(ids)
    return [positions[..., axis, None] * f.to(positions) for axis, f in enumerate(scaled)], factor
