"""Images to latents: conversion of any image type, and VAE encoding with a mean or sampled posterior."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..diffusion.noise import seeded_noise
from ..errors import refuse
from ..families import Latent
from ..io.number_checks import all_finite
from ..io.picture_files import pixels_of, upright
from ..runtime.placement import device_of, dtype_of, upcast_vae
from ..settings.sizes import check_sides

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

_FORMS = (
    "PIL image, (H, W, 3) or (B, H, W, 3) array in [0, 1], uint8 or uint16, "
    "(3, H, W) or (B, 3, H, W) tensor in [0, 1] or [-1, 1], or a list of them"
)
UNIT, SIGNED = (0.0, 1.0), (-1.0, 1.0)
_WHOLE = {torch.uint8: 255.0, torch.uint16: 65535.0}

Range = tuple[float, float]


def to_pixels(
    image: Any,
    size: int | tuple[int, int] | None = None,
    factor: int = 8,
    value_range: Sequence[float] | None = None,
) -> torch.Tensor:
    """Converts one or more images of any supported type to (B, 3, H, W) float32 in [-1, 1].

    PIL, uint8 and uint16 images range from 0 to their largest value, float arrays are in [0, 1]; for float tensors see
    :func:`value_range_of`. PIL images are rotated by their EXIF orientation.

    Args:
        size: side of a square, or (height, width), to resize to: bicubic, without keeping the aspect ratio, as GDF.
        factor: must divide both sides.
    """
    sides = _sides(size)
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    if not images:
        raise refuse("image", image, _FORMS, "give at least one picture")
    signed = value_range_of(images, value_range) == SIGNED
    return joined([_resize(_single(i, signed), sides) for i in images], factor)


def joined(batches: Sequence[torch.Tensor], factor: int = 8) -> torch.Tensor:
    """Concatenates images (b, 3, H, W) to one batch."""
    shapes = {tuple(b.shape[-2:]) for b in batches}
    if len(shapes) > 1:
        raise refuse("image sizes", sorted(shapes), "one common size", "set size=..., or tap them one by one")
    # Arrays and PIL images are channels-last in memory, for which convolutions round differently.
    pixels = torch.cat(list(batches)).contiguous()
    height, width = pixels.shape[-2:]
    if height % factor or width % factor:
        near = (max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor))
        raise refuse("image size", (height, width), f"multiples of {factor}", f"resize to {near}, or set size=...")
    return pixels


def value_range_of(images: Any, value_range: Sequence[float] | None = None) -> Range:
    """The range of float tensors: ``value_range``, or (-1, 1) if any value is negative, else (0, 1).

    All tensors of one call are judged together. An image in [-1, 1] without dark parts has no negative value, so pass
    ``value_range=(-1, 1)`` for such images.

    Args:
        images: images, nested in lists or not; everything except float tensors is ignored.
    """
    if value_range is not None:
        bounds = tuple(float(v) for v in value_range)
        if bounds not in (UNIT, SIGNED):
            raise refuse("value_range", value_range, "(0, 1), (-1, 1) or None", "scale the tensor")
        return UNIT if bounds == UNIT else SIGNED
    return SIGNED if any(bool((t < 0).any()) for t in _float_tensors(images)) else UNIT


def _float_tensors(images: Any) -> Iterator[torch.Tensor]:
    if isinstance(images, (list, tuple)):
        for image in images:
            yield from _float_tensors(image)
    elif isinstance(images, torch.Tensor) and images.is_floating_point():
        yield images.float() if images.element_size() == 1 else images  # 8-bit floats are not compared


def picture_sizes(image: Any) -> list[tuple[int, int]]:
    """(height, width) of each image, of any type that :func:`to_pixels` accepts."""
    sizes: list[tuple[int, int]] = []
    for entry in image if isinstance(image, (list, tuple)) else [image]:
        if isinstance(entry, (torch.Tensor, np.ndarray)):
            height, width = entry.shape[-2:] if isinstance(entry, torch.Tensor) else entry.shape[-3:-1]
            sizes += [(int(height), int(width))] * (len(entry) if entry.ndim == 4 else 1)
        else:
            seen = upright(entry)
            sizes.append((seen.height, seen.width))
    return sizes


def _single(image: Any, signed: bool) -> torch.Tensor:
    """(B, 3, H, W) in [-1, 1] from a single entry."""
    if isinstance(image, torch.Tensor):
        return _scale(image.detach(), signed)
    if isinstance(image, np.ndarray):
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(image, image.dtype.newbyteorder("=")))
        except TypeError as error:  # texts and objects
            raise refuse("image values", str(image.dtype), _FORMS, "use finite floats, uint8 or uint16") from error
        return _scale(tensor.movedim(-1, -3) if tensor.ndim >= 3 else tensor, signed=False)
    if hasattr(image, "convert"):  # PIL
        return _scale(torch.from_numpy(pixels_of(image)).movedim(-1, -3), signed=False)
    raise refuse("image", type(image).__name__, _FORMS, "convert it first")


def _scale(tensor: torch.Tensor, signed: bool) -> torch.Tensor:
    if tensor.ndim == 3:
        tensor = tensor[None]
    if tensor.ndim != 4 or tensor.shape[1] != 3 or 0 in tensor.shape:
        raise refuse("image shape", tuple(tensor.shape), _FORMS, "give RGB; tensors are channels first, arrays last")
    if tensor.dtype in _WHOLE:
        return tensor.float() / (_WHOLE[tensor.dtype] / 2) - 1
    if not tensor.is_floating_point() or not all_finite(tensor):
        raise refuse("image values", str(tensor.dtype), _FORMS, "use finite floats, uint8 or uint16")
    tensor = tensor.float()
    low, high = tensor.amin().item(), tensor.amax().item()
    if high > 1 + 1e-3 or low < (-1 - 1e-3 if signed else -1e-3):
        raise refuse("image values", f"{low:.3g} to {high:.3g}", _FORMS, "divide 0..255 values by 255")
    return (tensor if signed else tensor * 2 - 1).clamp(-1, 1)


def _sides(size: Any) -> tuple[int, int] | None:
    """(height, width) from one side or both."""
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    check_sides("size", *(sides if len(sides) == 2 else (size,)))
    return int(sides[0]), int(sides[1])


def _resize(pixels: torch.Tensor, size: tuple[int, int] | None) -> torch.Tensor:
    if size is None or tuple(pixels.shape[-2:]) == size:
        return pixels
    # antialiased bicubic equals PIL's bicubic, GDF's choice
    return F.interpolate(pixels, size=size, mode="bicubic", antialias=True).clamp(-1, 1)


@torch.no_grad()
def encode_pixels(
    vae: AutoencoderKL,
    pixels: torch.Tensor,
    posterior: str = "mean",
    seed: int = 0,
    noise: torch.Tensor | None = None,
    latent: Latent | None = None,
) -> torch.Tensor:
    """Scaled latents (B, C, h, w), float32, of images (B, 3, H, W) in [-1, 1]; one call of the encoder.

    ``posterior="sample"`` samples every image with the first noise of ``seed``, or with ``noise`` of the latents'
    shape. A VAE whose config has ``force_upcast`` runs in float32 and is restored afterwards.

    Args:
        latent: the latent format of the model's family; Stable Diffusion's by default.
    """
    latent = latent or Latent()
    pixels = pixels[:, :, None] if latent.frames and pixels.ndim == 4 else pixels
    with upcast_vae(vae) as wide:
        encoded = wide.encode(pixels.to(device_of(wide), dtype_of(wide)))
    posteriors: Any = getattr(encoded, "latent_dist", None)  # AutoencoderTiny gives latents
    if posteriors is None and posterior == "sample":
        remedy = "it encodes a picture as one latent, not as a distribution"
        raise refuse("posterior", f"'sample' with {type(vae).__name__}", "'mean'", remedy)
    latents = (encoded.latents if posteriors is None else posteriors.mean).float()
    if posterior == "sample":
        if noise is None:
            noise = seeded_noise([seed], latents.shape[1:]).expand_as(latents)  # the same for all images
        latents = latents + posteriors.std.float() * noise.to(latents.device).reshape(latents.shape)
    if not all_finite(latents):
        raise refuse("VAE latents", "NaN or infinite values", "finite values", "run the VAE in float32")
    return latent.scaled(vae, latents)


def per_picture(values: str | Sequence[str], count: int, what: str) -> list[str]:
    """A list of ``count`` strings, from one for all images or one per image."""
    texts: list[str] = [*values] if isinstance(values, (list, tuple)) else [values]  # type: ignore[list-item]
    if len(texts) not in (1, count) or not all(isinstance(v, str) for v in texts):
        raise refuse(what, texts, f"one text, or {count}: one per picture", "repeat or remove texts")
    return texts
