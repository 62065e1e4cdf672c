"""Masks of an inversion, which mark the subject in the latents."""

from __future__ import annotations

import torch

from ...errors import refuse


def latent_mask(mask: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """An image-size mask (B, H, W) or (B, 1, H, W) in [0, 1] -> (B, 1, height, width) by area means.

    Crop or resize it together with its image first; the published code resizes the mask to a square while it crops
    the image at random.
    """
    mask = mask[:, None] if mask.ndim == 3 else mask
    return torch.nn.functional.adaptive_avg_pool2d(mask.float(), (height, width))


def mask_for(mask: torch.Tensor | None, latents: torch.Tensor) -> torch.Tensor:
    """(B, 1, H, W) weights for latents (B, C, H, W), (B, 1, 1, H, W) for (B, C, T, H, W); ones without a mask."""
    if mask is None:
        return torch.ones(len(latents), *[1] * (latents.ndim - 1), device=latents.device)
    mask = mask.float().to(latents.device)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-2:] != latents.shape[-2:]:
        shown = tuple(mask.shape)
        raise refuse("mask", shown, f"(B, 1, {latents.shape[-2]}, {latents.shape[-1]})", "resize it to latent size")
    if float(mask.min()) < 0 or float(mask.max()) > 1:
        span = (float(mask.min()), float(mask.max()))
        raise refuse("mask values", span, "0 .. 1", "divide an 8-bit mask by 255")
    if not float(mask.flatten(1).sum(1).min()) > 0:
        raise refuse("mask", "empty", "a mask that covers the subject", "paint the subject white")
    weights = mask.expand(len(latents), *mask.shape[1:])
    return weights[:, :, None] if latents.ndim == 5 else weights
