"""Eq. 3 on noise schedules, as two possible operations.

``relabel`` is the paper's: the table sigma(t) itself is multiplied, so a timestep *means* more noise. Right only for
weights trained under the scaled table. ``resample`` keeps the meaning of timesteps and moves the sampling grid to
more noise, as SD3's shift does. Right for untouched checkpoints.

In the variable sigma^2 / (1 + sigma^2) the factor is r^2, in tau = sigma / (1 + sigma) it is r; they must not be mixed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..diffusion.guidance import scale_for_size
from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..settings.sizes import is_side

Size = tuple[int, int]
_LARGEST = 16.0


def check_size(what: str, size: Any) -> Size:
    """(width, height) in pixels as ints."""
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if len(sides) != 2 or not all(map(is_side, sides)):
        raise refuse(what, size, "(width, height), whole pixels from 1 to 65536", "such as (1024, 1024)")
    return sides[0], sides[1]


def check_ratio(ratio: float) -> float:
    """r as a float."""
    if not math.isfinite(ratio) or not 1 / _LARGEST <= ratio <= _LARGEST:
        raise refuse("resolution ratio", ratio, "1/16 .. 16", "check both sizes: they are in pixels, not latents")
    return float(ratio)


def size_ratio(train: Size, target: Size) -> float:
    """r = s'/s; for non-square images the square root of the ratio of areas (our extension)."""
    (w, h), (w2, h2) = check_size("train size", train), check_size("target size", target)
    return check_ratio(math.sqrt((w2 * h2) / (w * h)))


def scaled_guidance(guidance: float, ratio: float) -> float:
    """The guidance scale for r times the resolution; 1.5 at 256 becomes 2.0 at 512. 1 (no guidance) stays 1."""
    return scale_for_size(guidance, check_ratio(ratio))


# --- the map ------------------------------------------------------------------------------------------------------
def shift_abar(abar: torch.Tensor, ratio: float) -> torch.Tensor:
    """abar at the new size; 1 / ratio is the inverse, ratios multiply, 1 is the identity bit for bit."""
    # Berrada et al. 2024, Eq. 3: abar' = s^2 abar / (s'^2 + abar (s^2 - s'^2)), r = s'/s
    return abar / (ratio**2 + abar * (1 - ratio**2))


def shift_tau(tau: torch.Tensor, ratio: float) -> torch.Tensor:
    """The same for flow models, tau = sigma / (1 + sigma) in [0, 1]; composes with a model's shift."""
    # Eq. 3 under tau = sigma / (1 + sigma); Esser et al. 2024, Eq. 23, with r = sqrt(m / n)
    return ratio * tau / (1 + (ratio - 1) * tau)


def betas_of(abar: torch.Tensor) -> torch.Tensor:
    """(T,) betas of a decreasing table of abar."""
    abar = torch.as_tensor(abar, dtype=torch.float64)
    betas = 1 - abar / torch.cat([abar.new_ones(1), abar[:-1]])
    if not bool(((betas > 0) & (betas < 1)).all()):
        raise refuse("abar table", "one that does not fall everywhere", "1 > abar_0 > abar_1 > ... > 0", "check it")
    return betas


# --- two operations -----------------------------------------------------------------------------------------------
def relabel(schedule: NoiseSchedule, ratio: float) -> NoiseSchedule:
    """The schedule in which every timestep has ``ratio`` times its sigma."""
    if schedule.kind == "flow":
        raise refuse("relabel", "a flow model", "models with a table of betas", "use resample: it is the same shift")
    # Eq. 3 on sigma: sigma'_t = r sigma_t, so log-SNR falls by 2 ln r at every t
    return NoiseSchedule("vp", schedule.log_sigmas + math.log(check_ratio(ratio)), schedule.steps)


def shift_grid(sigmas: torch.Tensor, ratio: float, sigma_max: float) -> torch.Tensor:
    """Shifts each sigma of a grid; float64, same shape; ratio 1 returns the same values.

    Args:
        sigmas: any shape, 0 .. sigma_max; 0 is fixed.
        sigma_max: the highest noise level of the network, which is fixed too: tau / tau_max is shifted.
    """
    sigmas, ratio = torch.as_tensor(sigmas, dtype=torch.float64), check_ratio(ratio)
    if ratio == 1:
        return sigmas.clone()
    highest = sigma_max / (1 + sigma_max)
    fraction = (sigmas / (1 + sigmas) / highest).clamp(max=1)
    tau = shift_tau(fraction, ratio) * highest
    return torch.where(fraction < 1, tau / (1 - tau), sigma_max)


def resample(schedule: NoiseSchedule, sigmas: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sigmas, timesteps): a shifted decreasing sampling grid, and the timestep of each point.

    Args:
        sigmas: (S,) decreasing, usually ending in 0.

    Returns:
        Both (S,) float64. Timesteps of tables are integers: the nearest entry in log sigma, as in ComfyUI.
    """
    sigmas = torch.as_tensor(sigmas, dtype=torch.float64)
    if sigmas.ndim != 1 or not len(sigmas) or bool((sigmas < 0).any()) or bool((sigmas.diff() > 0).any()):
        raise refuse("sampling grid", sigmas.tolist(), "falling sigmas of 0 or more", "sort them, highest first")
    if schedule.kind == "flow":
        moved = shift_tau(sigmas, check_ratio(ratio))
        return moved, schedule.timestep(moved)
    moved = shift_grid(sigmas, ratio, math.exp(float(schedule.log_sigmas[-1])))
    return moved, nearest_timestep(schedule, moved)


def nearest_timestep(schedule: NoiseSchedule, sigmas: torch.Tensor) -> torch.Tensor:
    """The integer timestep whose sigma is nearest in the logarithm, clamped to the table."""
    return schedule.timestep(sigmas).round()


# --- exporters ----------------------------------------------------------------------------------------------------
def trained_betas(schedule: NoiseSchedule, ratio: float) -> list[float]:
    """``relabel`` for a diffusers scheduler's ``trained_betas`` (set ``rescale_betas_zero_snr`` to False with it)."""
    abar = 1 / (1 + (2 * relabel(schedule, ratio).log_sigmas).exp())
    return betas_of(abar).tolist()


def flux_shift(tokens: int, base: int = 256, most: int = 4096, low: float = 0.5, high: float = 1.15) -> float:
    """FLUX's shift e^mu for a number of image tokens; mu is linear in it, also beyond ``most``."""
    # Black Forest Labs' flux, sampling.py get_lin_function: mu = m tokens + b through (base, low) and (most, high)
    slope = (high - low) / (most - base)
    return math.exp(slope * tokens + low - slope * base)
