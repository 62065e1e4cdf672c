"""Activations as pictures: principal components as colours, and where a model looks for a word of the prompt.

Tang et al. 2023 (DAAM, arXiv 2210.04885) sum attention over the steps of a run; here it is one timestep of a picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import functional

from ..errors import refuse
from ..io.number_checks import all_finite
from ..network.site import MapSite
from ..settings.one_line import one_line
from ..settings.sizes import check_sides
from ..tracing.addresses import sites_of
from ..tracing.hooks import Activation
from .container import Activations

Maps = Activation | torch.Tensor
_RELATIVE_RANK = 1e-10
"""A component whose variance is below this fraction of the first one's is rounding noise and rendered grey."""


@one_line
@dataclass(frozen=True)
class PCABasis:
    """Mean (C,), components (3, C), and the range [low, high] (3,) rendered from dark to bright; float64, CPU."""

    mean: torch.Tensor
    components: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def fit(cls, maps: Maps | Iterable[Maps], max_samples: int = 16384) -> PCABasis:
        """Fit on all positions of activations (B, C, h, w), or on ``max_samples`` evenly spaced ones.

        Signs are fixed (the largest weight of each component is positive), so equal data give equal colours.
        """
        maps = [maps] if isinstance(maps, (Activation, torch.Tensor)) else list(maps)
        flat = [_positions(_as_maps(m)) for m in maps]
        if not flat or len({f.shape[1] for f in flat}) != 1:
            shapes = [tuple(f.shape) for f in flat]
            raise refuse("PCA maps", shapes, "maps of one channel count", "fit one layer at a time")
        total = sum(len(f) for f in flat)
        stride = max(1, -(-total // max_samples))
        samples = torch.cat([f[::stride] for f in flat]).cpu().double()
        mean = samples.mean(0)
        components = _principal(samples - mean)
        scores = (samples - mean) @ components.T
        return cls(mean, components, scores.amin(0), scores.amax(0))

    def project(self, maps: Maps) -> torch.Tensor:
        """(B, 3, h, w) float64 scores, not yet scaled."""
        tensor = _as_maps(maps)
        if tensor.shape[1] != len(self.mean):
            raise refuse("PCA channels", tensor.shape[1], len(self.mean), "use the basis of the same layer")
        scores = (_positions(tensor).cpu().double() - self.mean) @ self.components.T
        return scores.reshape(tensor.shape[0], *tensor.shape[2:], 3).permute(0, 3, 1, 2)

    def rgb(self, maps: Maps) -> torch.Tensor:
        """(B, 3, h, w) float32 in [0, 1]; values outside the fitted range are clipped, empty components mid-grey."""
        low, span = self.low[:, None, None], (self.high - self.low)[:, None, None]
        flat = span <= 0
        scaled = (self.project(maps) - low) / torch.where(flat, torch.ones_like(span), span)
        return torch.where(flat, torch.full_like(scaled, 0.5), scaled).clamp(0, 1).float()


def pca_rgb(maps: Maps, basis: PCABasis | None = None, size: int | tuple[int, int] | None = None) -> torch.Tensor:
    """Image of an activation (B, C, h, w): (B, 3, h, w) float32 in [0, 1] on the CPU.

    Args:
        basis: shared colours; None fits each image separately, as GDF does.
        size: enlarge by nearest neighbour to (height, width), or to a square.
    """
    check_sides("size", *(size if isinstance(size, (tuple, list)) else (size,)))
    tensor = _as_maps(maps)
    if basis is None:
        pictures = torch.cat([PCABasis.fit(single).rgb(single) for single in tensor.split(1)])
    else:
        pictures = basis.rgb(tensor)
    if size is None:
        return pictures
    return F.interpolate(pictures, size=(size, size) if isinstance(size, int) else tuple(size), mode="nearest")


def _as_maps(maps: Maps) -> torch.Tensor:
    tensor = maps.tensor if isinstance(maps, Activation) else maps
    gridless = isinstance(maps, Activation) and maps.grid is None
    if gridless or tensor.ndim != 4 or 0 in tensor.shape:
        name = maps.address if isinstance(maps, Activation) else "tensor"
        raise refuse("PCA", f"{name} {tuple(tensor.shape)}", "spatial maps (B, C, h, w)", "tap a layer with a grid")
    if not all_finite(tensor):
        raise refuse("PCA", "NaN or infinite values", "finite activations", "tap in float32")
    return tensor.detach()


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _principal(centred: torch.Tensor) -> torch.Tensor:
    """(3, C) unit vectors of the largest variance, zero beyond the rank."""
    count, channels = centred.shape
    if channels <= count:
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        axes = vectors.T
    else:  # fewer positions than channels: the small Gram matrix has the same non-zero spectrum
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        axes = (centred.T @ vectors).T / values.clamp_min(1e-300).sqrt()[:, None]
    axes, values = axes.flip(0)[:3], values.flip(0)[:3]
    axes = torch.where((values > _RELATIVE_RANK * values[0].clamp_min(1e-20))[:, None], axes, torch.zeros_like(axes))
    pivot = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * torch.where(pivot < 0, -1.0, 1.0)
    return F.pad(axes, (0, 0, 0, 3 - len(axes)))


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
