"""Where a model looks for a word: attention of the picture's places to its tokens, averaged over layers and heads.

Tang et al. 2023 (DAAM, arXiv 2210.04885) sum over the steps of a run as well; here it is one timestep of a picture.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..errors import refuse
from ..network.site import MapSite
from ..tracing.addresses import sites_of
from .container import Activations


def text_maps(backbone: nn.Module) -> tuple[str, ...]:
    """Addresses of all attention maps whose keys are text tokens, or text tokens first."""
    sites = sites_of(backbone).values()
    maps = tuple(s.address for s in sites if isinstance(s, MapSite) and (s.text_keys or s.joint))
    if not maps:
        raise refuse("model", "no attention to text", "a model with a prompt", "load another model")
    return maps


def word_map(maps: Activations, size: tuple[int, int]) -> torch.Tensor:
    """(B, H, W) in 0..1, each picture's least and most attended place; of maps (B, heads, Q, K) of the word's tokens.

    Args:
        size: (H, W) of the pictures, whose shape the maps' Q places have.
    """
    height, width = size
    total = torch.zeros(len(next(iter(maps.values())).tensor), 1, height, width)
    for address, activation in maps.items():
        positions = activation.tensor.float().mean(1).sum(-1).cpu()  # (B, Q)
        rows = round((positions.shape[1] * height / width) ** 0.5)
        if rows * (positions.shape[1] // rows) != positions.shape[1]:
            accepted = f"those of a picture of {width} x {height}"
            raise refuse(address, f"{positions.shape[1]} positions", accepted, "crop it")
        grid = positions.unflatten(1, (1, rows, -1))
        total += functional.interpolate(grid / grid.mean((1, 2, 3), keepdim=True), size, mode="bicubic")
    least, most = (f(total, (1, 2, 3), keepdim=True) for f in (torch.amin, torch.amax))
    return ((total - least) / (most - least).clamp_min(1e-12))[:, 0]
