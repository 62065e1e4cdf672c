"""What the official code of GDF does where Vitrine's defaults differ, for runs that must equal it.

The equations are those of Darkbblue/generic-diffusion-feature (commit e4361a6), ``feature/diffusion_feature.py``:

====================  ===============================================  ===============================================
what                  Vitrine                                          GDF's code
====================  ===============================================  ===============================================
timestep              the network's own                                its scheduler's: t + 1 under PNDM (SD 1.5)
latent                the posterior's mean                             one sample of it
noise                 one for each seed, the same for all pictures     one draw for the whole batch, after the samples
pictures              bicubic in floating point                        Pillow's bicubic in bytes; tensors bilinear
joined features       every place of unit length at every position     as they are, at 128 x 128
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
"""The grid at which the official correspondence code joins features."""


def check_protocol(protocol: str) -> bool:
    """Whether the protocol is GDF's.

    Raises:
        VitrineError: If there is no such protocol.
    """
    if protocol not in PROTOCOLS:
        raise refuse("protocol", protocol, PROTOCOLS, "'gdf' equals the official code, 'vitrine' depends on no batch")
    return protocol == "gdf"


def gdf_timestep(scheduler: Any, t: float) -> float:
    """The network's timestep that the official code runs when it is told t: diffusers' img2img rule, 1000 steps.

    Args:
        scheduler: the pipeline's own, which stays as it is.

    Raises:
        VitrineError: If no step is left, as for t = 0 under most schedulers.
    """
    steps = copy.deepcopy(scheduler)
    steps.set_timesteps(1000)
    skipped = max(1000 - min(int(1000 * (t / 1000)), 1000), 0)  # strength t / 1000
    left = steps.timesteps[skipped * steps.order :]
    if not len(left):
        raise refuse("timestep", t, "1 .. 998 under protocol='gdf'", "GDF uses 50")
    return float(left[0])


def gdf_pixels(image: Any, size: int, factor: int, value_range: Range) -> torch.Tensor:
    """(B, 3, size, size) in [-1, 1]: Pillow pictures by Pillow's own resizing, all others bilinearly.

    Raises:
        VitrineError: As :func:`~.images.to_pixels`.
    """
    batches = []
    for entry in image if isinstance(image, (list, tuple)) else [image]:
        if hasattr(entry, "resize") and hasattr(entry, "convert"):
            batches.append(to_pixels(entry.resize((size, size)).convert("RGB"), None, factor))
        else:
            pixels = to_pixels(entry, None, 1, value_range)
            batches.append(F.interpolate(pixels, (size, size), mode="bilinear"))
    return to_pixels(batches, None, factor, (-1, 1))


def gdf_features(taps: Activations, size: tuple[int, int] | None = None) -> torch.Tensor:
    """(B, C, H, W): all spatial places resized bilinearly and joined without normalisation."""
    return taps.concat(size)


def gdf_generator(seeds: Sequence[int]) -> torch.Generator:
    """The generator from which a whole batch draws its posterior samples and then its noise.

    The official code draws from PyTorch's global generator: ``torch.manual_seed(seed)`` before it, on the CPU, gives
    the same numbers.

    Raises:
        VitrineError: If there are several seeds; the official code knows no ensembles.
    """
    if len(seeds) != 1:
        raise refuse("seeds", tuple(seeds), "one under protocol='gdf'", "the official code averages over no seeds")
    return torch.Generator().manual_seed(seeds[0])


def gdf_draws(seeds: Sequence[int], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Posterior samples and noise of a whole batch, standard normal, in the official code's order.

    Raises:
        VitrineError: If there are several seeds.
    """
    generator = gdf_generator(seeds)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def published_timestep(t: float, xl: bool) -> float:
    """:func:`gdf_timestep` where no scheduler is at hand: SDXL's Euler runs t, SD 1.x's PNDM t + 1.

    Raises:
        VitrineError: If t is outside 1 .. 998.
    """
    if not 1 <= t <= 998:
        raise refuse("timestep", t, "1 .. 998 under protocol='gdf'", "GDF uses 50")
    step = int(1000 * (t / 1000))
    return float(step if xl else step + 1)
