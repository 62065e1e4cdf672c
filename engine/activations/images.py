"""Pictures in, latents out: the usual forms of a picture, one VAE encode, a seeded or mean posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import refuse
from ..noise import seeded_noise
from ..placement import device_of, dtype_of

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

_FORMS = (
    "PIL image, (H, W, 3) or (B, H, W, 3) array in [0, 1] or uint8, "
    "(3, H, W) or (B, 3, H, W) tensor in [0, 1] or [-1, 1], or a list of them"
)


def to_pixels(image: Any, size: int | None = None, factor: int = 8) -> torch.Tensor:
    """Any usual form of one or more pictures as (B, 3, H, W) float32 in [-1, 1].

    Ranges are diffusers': PIL and uint8 0..255, float arrays [0, 1], float tensors [0, 1], or [-1, 1] where any value
    of that tensor is negative. ``size`` resizes to a square, bicubic, aspect ratio not kept, as GDF does.

    Raises:
        VitrineError: If a picture has another form or range, sizes differ, or ``factor`` does not divide the sides.
    """
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    if not images:
        raise refuse("image", image, _FORMS, "give at least one picture")
    batches = [_resize(_single(i), size) for i in images]
    shapes = {tuple(b.shape[-2:]) for b in batches}
    if len(shapes) > 1:
        raise refuse("image sizes", sorted(shapes), "one common size", "set size=..., or tap them one by one")
    pixels = torch.cat(batches)
    height, width = pixels.shape[-2:]
    if height % factor or width % factor:
        near = (max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor))
        raise refuse("image size", (height, width), f"multiples of {factor}", f"resize to {near}, or set size=...")
    return pixels


def _single(image: Any) -> torch.Tensor:
    """(B, 3, H, W) in [-1, 1] from a single entry."""
    if isinstance(image, torch.Tensor):
        return _scale(image.detach(), signed=True)
    if isinstance(image, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(image))
        return _scale(tensor.movedim(-1, -3) if tensor.ndim >= 3 else tensor, signed=False)
    if hasattr(image, "convert"):  # PIL
        return _scale(torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, -3), signed=False)
    raise refuse("image", type(image).__name__, _FORMS, "convert it first")


def _scale(tensor: torch.Tensor, signed: bool) -> torch.Tensor:
    if tensor.ndim == 3:
        tensor = tensor[None]
    if tensor.ndim != 4 or tensor.shape[1] != 3 or 0 in tensor.shape:
        raise refuse("image shape", tuple(tensor.shape), _FORMS, "give RGB; tensors are channels first, arrays last")
    if tensor.dtype == torch.uint8:
        return tensor.float() / 127.5 - 1
    if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
        raise refuse("image values", str(tensor.dtype), _FORMS, "use finite floats or uint8")
    tensor = tensor.float()
    low, high = tensor.amin().item(), tensor.amax().item()
    if high > 1 + 1e-3 or low < (-1 - 1e-3 if signed else -1e-3):
        raise refuse("image values", f"{low:.3g} to {high:.3g}", _FORMS, "divide 0..255 values by 255")
    return (tensor if low < 0 and signed else tensor * 2 - 1).clamp(-1, 1)


def _resize(pixels: torch.Tensor, size: int | None) -> torch.Tensor:
    if size is None or tuple(pixels.shape[-2:]) == (size, size):
        return pixels
    # antialiased bicubic is PIL's own bicubic, GDF's choice
    return F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True).clamp(-1, 1)


@torch.no_grad()
def encode_pixels(vae: AutoencoderKL, pixels: torch.Tensor, posterior: str = "mean", seed: int = 0) -> torch.Tensor:
    """Scaled latents (B, C, h, w), float32, of (B, 3, H, W) in [-1, 1]: one call of the encoder.

    ``posterior="sample"`` draws each picture's sample from the first numbers of ``seed``. A VAE whose config says
    ``force_upcast`` runs in float32 and gets its own dtype back.

    Raises:
        VitrineError: If the encoder returns NaN or infinite values.
    """
    dtype, upcast = vae.dtype, vae.dtype == torch.float16 and getattr(vae.config, "force_upcast", False)
    try:
        if upcast:
            vae.to(torch.float32)
        posteriors = vae.encode(pixels.to(device_of(vae), dtype_of(vae))).latent_dist
    finally:
        if upcast:
            vae.to(dtype)
    latents = posteriors.mean.float()
    if posterior == "sample":
        noise = seeded_noise([seed], latents.shape[1:])  # the same for all pictures
        latents = latents + posteriors.std.float() * noise.to(latents.device)
    if not torch.isfinite(latents).all():
        raise refuse("VAE latents", "NaN or infinite values", "finite values", "run the VAE in float32")
    # latents = (z - shift) * scaling, diffusers' convention for every AutoencoderKL
    return (latents - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor


def per_picture(values: str | Sequence[str], count: int, what: str) -> list[str]:
    """One string for all pictures, or one for each.

    Raises:
        VitrineError: If their number is another, or one is not a string.
    """
    texts: list[str] = [*values] if isinstance(values, (list, tuple)) else [values]  # type: ignore[list-item]
    if len(texts) not in (1, count) or not all(isinstance(v, str) for v in texts):
        raise refuse(what, texts, f"one text, or {count}: one for each picture", "repeat or remove texts")
    return texts
