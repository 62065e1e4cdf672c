"""Multi-scale structural similarity (Wang et al. 2003), written so that its choices can be stated.

The published NeMo score uses torchmetrics' form with three scales and takes the data range from the batch, so that a
sample's score depends on its companions. Both that form and one with a fixed range are here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import refuse

WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
THREE_SCALES = (0.33, 0.33, 0.33)


def betas_for(side: int) -> tuple[float, ...]:
    """Exponents for a picture of that side: three scales from 44 px, two from 22, one below (11 at least)."""
    if side < WINDOW:
        raise refuse("picture side", side, f">= {WINDOW}", "decode to pixels, or use larger latents")
    return THREE_SCALES if side >= 44 else (0.5, 0.5) if side >= 22 else (1.0,)


def ms_ssim(
    a: torch.Tensor, b: torch.Tensor, betas: tuple[float, ...] = THREE_SCALES, data_range: float | None = None
) -> torch.Tensor:
    """(B,) similarity of (B, C, H, W) and (B, C, H, W), 1 for equal pictures, 0 at the least.

    Contrast-structure at the finer scales, full SSIM at the last, each clipped at 0 and raised to its exponent, with a
    Gaussian window of 11 pixels (sigma 1.5), K = 0.01 and 0.03, and 2 x 2 mean pooling between scales.

    Args:
        data_range: value range of the pictures; None takes the larger span of the two batches anew at each scale.
    """
    if a.shape != b.shape or a.ndim != 4:
        raise refuse("pictures", (tuple(a.shape), tuple(b.shape)), "two (B, C, H, W) of one shape", "resize them")
    if min(a.shape[-2:]) // 2 ** (len(betas) - 1) < WINDOW:
        raise refuse("scales", len(betas), f"fewer for {a.shape[-1]} px", "use betas_for(side)")
    product = a.new_ones(len(a), dtype=torch.float32)
    a, b = a.float(), b.float()
    for scale, beta in enumerate(betas):
        full, contrast = _ssim(a, b, data_range)
        last = scale == len(betas) - 1
        # Wang et al. 2003, Eq. 7
        product = product * (full if last else contrast).relu() ** beta
        if not last:
            a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return product


def _ssim(a: torch.Tensor, b: torch.Tensor, data_range: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(SSIM, contrast-structure), each (B,). The border that the window cannot fill is left out of the second only."""
    span = max(float(a.max() - a.min()), float(b.max() - b.min())) if data_range is None else data_range
    c1, c2 = (K1 * span) ** 2, (K2 * span) ** 2
    count, pad = len(a), (WINDOW - 1) // 2
    padded = [F.pad(x, (pad,) * 4, mode="reflect") for x in (a, b)]
    stack = torch.cat([padded[0], padded[1], padded[0] ** 2, padded[1] ** 2, padded[0] * padded[1]])
    mu_a, mu_b, aa, bb, ab = blur(stack).split(count)
    var_a, var_b = (aa - mu_a**2).clamp(min=0), (bb - mu_b**2).clamp(min=0)
    contrast = (2 * (ab - mu_a * mu_b) + c2) / (var_a + var_b + c2)
    full = contrast * (2 * mu_a * mu_b + c1) / (mu_a**2 + mu_b**2 + c1)
    inner = contrast[..., pad:-pad, pad:-pad]
    return full.flatten(1).mean(1), inner.flatten(1).mean(1)


def blur(x: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) under a separable Gaussian window of 11 taps (sigma 1.5), without padding: 10 px smaller."""
    steps = torch.arange(WINDOW, device=x.device, dtype=x.dtype) - (WINDOW - 1) / 2
    taps = torch.exp(-0.5 * (steps / SIGMA) ** 2)
    taps = (taps / taps.sum()).expand(x.shape[1], 1, WINDOW)
    rows = F.conv2d(x, taps[:, :, :, None], groups=x.shape[1])
    return F.conv2d(rows, taps[:, :, None, :], groups=x.shape[1])
