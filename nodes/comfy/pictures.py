"""IMAGE and MASK as other nodes hand them over, in the one form that ours take, or refused."""

from __future__ import annotations

import comfy.utils
import torch

from ...engine.errors import refuse
from ...engine.runtime.finite import require_finite

_BEYOND = 0.5
"""How far sharpening and resampling may exceed 0 and 1."""


def as_pictures(image: torch.Tensor, what: str = "image") -> torch.Tensor:
    """IMAGE -> (B, H, W, 3), B at least 1: grey pictures in three channels, those with alpha without it."""
    pictures = image[None] if image.ndim == 3 else image
    if pictures.ndim != 4 or not pictures.numel() or pictures.shape[-1] not in (1, 3, 4):
        accepted = "one picture or more, (B, H, W, channels) with 1, 3 or 4 channels"
        raise refuse(what, tuple(image.shape), accepted, "connect Load Image or VAE Decode")
    _check_levels(pictures, what)
    return pictures.expand(-1, -1, -1, 3) if pictures.shape[-1] == 1 else pictures[..., :3]


def _check_levels(values: torch.Tensor, what: str) -> None:
    """Refuses NaN, such as a VAE in float16 makes, and scales other than 0 to 1."""
    if not values.is_floating_point():
        accepted = "numbers from 0 to 1, as ComfyUI's own nodes give them"
        raise refuse(what, str(values.dtype), accepted, "divide by 255, or load it with Load Image")
    require_finite(values, what, "look at the picture before: a VAE in float16 may need --fp32-vae")
    least, most = float(values.min()), float(values.max())
    if least < -_BEYOND or most > 1 + _BEYOND:
        accepted = "numbers from 0 to 1, as ComfyUI's own nodes give them"
        raise refuse(what, f"{least:.4g} to {most:.4g}", accepted, "scale it: x / 255, or x / 2 + 0.5 from -1 to 1")


def as_masks(mask: torch.Tensor, pictures: torch.Tensor | None = None, what: str = "mask") -> torch.Tensor:
    """MASK -> (B, H, W), one for each picture (B, H, W, C); one mask serves all.

    Args:
        pictures: None where the masks are not of pictures.
    """
    masks = mask[None] if mask.ndim == 2 else mask
    if masks.ndim == 4:
        masks = masks[:, 0] if masks.shape[1] == 1 else masks[..., 0] if masks.shape[-1] == 1 else masks
    if masks.ndim != 3 or not masks.numel():
        accepted = "one mask or more, (B, H, W)"
        raise refuse(what, tuple(mask.shape), accepted, "connect Load Image's MASK, or Convert Image to Mask")
    masks = masks.float() if masks.dtype == torch.bool else masks
    _check_levels(masks, what)
    if pictures is None:
        return masks
    if len(masks) not in (1, len(pictures)) or masks.shape[1:] != pictures.shape[1:3]:
        shown = f"{len(masks)} of {masks.shape[2]} x {masks.shape[1]}"
        wanted = f"{len(pictures)} of {pictures.shape[2]} x {pictures.shape[1]}"
        remedy = "crop or resize pictures and masks together, and batch them in the same order"
        raise refuse(what, shown, f"{wanted}, the pictures' number and size, or one mask for all", remedy)
    return masks.expand(len(pictures), -1, -1)


def resized(pictures: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, H, W, 3) at the height and width of others, cropped around the middle."""
    height, width = like.shape[1:3]
    fitted: torch.Tensor = comfy.utils.common_upscale(pictures.movedim(-1, 1), width, height, "area", "center")
    return fitted.movedim(1, -1)
