"""GDF's official protocol where Vitrine's defaults differ, for runs that must equal it.

The equations are those of Darkbblue/generic-diffusion-feature (commit e4361a6), ``feature/diffusion_feature.py``:

====================  ===============================================  ===============================================
what                  Vitrine                                          GDF's code
====================  ===============================================  ===============================================
timestep              the network's                                    its scheduler's:  t + 1 under PNDM (SD 1.5)
latent                the posterior's mean                             one sample of it
noise                 one per seed, the same for all images            sampled for the whole batch, after the posterior
images                bicubic in floating point                        Pillow's bicubic in bytes; tensors bilinear
joined features       each site normalised at every position           not normalised, at 128 x 128
====================  ===============================================  ===============================================
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import refuse
from .container import Activations
from .picture_latents import Range, to_pixels

PROTOCOLS = ("vitrine", "gdf")
CORRESPONDENCE_SIZE = (128, 128)
"""The grid at which the official correspondence code concatenates features."""


def check_protocol(protocol: str) -> bool:
    """Whether the protocol is GDF's."""
    if protocol not in PROTOCOLS:
        raise refuse("protocol", protocol, PROTOCOLS, "'gdf' equals the official code, 'vitrine' depends on no batch")
    return protocol == "gdf"


def gdf_timestep(scheduler: Any, t: float) -> float:
    """The network timestep that the official code uses for a given t: diffusers' img2img rule with 1000 steps.

    Args:
        scheduler: the pipeline's; it is not changed.
    """
    steps = copy.deepcopy(scheduler)
    steps.set_timesteps(1000)
    skipped = max(1000 - min(int(1000 * (t / 1000)), 1000), 0)  # strength t / 1000
    left = steps.timesteps[skipped * steps.order :]
    if not len(left):
        raise refuse("timestep", t, "1 .. 998 under protocol='gdf'", "GDF uses 50")
    return float(left[0])


def gdf_pixels(image: Any, size: int, factor: int, value_range: Range) -> torch.Tensor:
    """(B, 3, size, size) in [-1, 1]: Pillow images resized by Pillow, all others bilinearly."""
    batches = []
    for entry in image if isinstance(image, (list, tuple)) else [image]:
        if hasattr(entry, "resize") and hasattr(entry, "convert"):
            batches.append(to_pixels(entry.resize((size, size)).convert("RGB"), None, factor))
        else:
            pixels = to_pixels(entry, None, 1, value_range)
            batches.append(F.interpolate(pixels, (size, size), mode="bilinear"))
    return to_pixels(batches, None, factor, (-1, 1))


def gdf_features(taps: Activations, size: tuple[int, int] | None = None) -> torch.Tensor:
    """(B, C, H, W): all spatial sites, resized bilinearly and concatenated without normalisation."""
    return taps.concat(size)


def gdf_generator(seeds: Sequence[int]) -> torch.Generator:
    """The generator of a whole batch, for its posterior samples and then its noise.

    The official code uses PyTorch's global generator: after ``torch.manual_seed(seed)`` on the CPU it samples the same
    numbers.
    """
    if len(seeds) != 1:
        raise refuse("seeds", tuple(seeds), "one under protocol='gdf'", "the official code does not average over seeds")
    return torch.Generator().manual_seed(seeds[0])


def gdf_samples(seeds: Sequence[int], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Posterior samples and noise of a whole batch, standard normal, in the official code's order."""
    generator = gdf_generator(seeds)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def published_timestep(t: float, xl: bool) -> float:
    """:func:`gdf_timestep` without a scheduler: t for SDXL's Euler, t + 1 for SD 1.x's PNDM."""
    if not 1 <= t <= 998:
        raise refuse("timestep", t, "1 .. 998 under protocol='gdf'", "GDF uses 50")
    step = int(1000 * (t / 1000))
    return float(step if xl else step + 1)
