"""A LoRA in memory: layer path -> the two factors of its weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoraLayer:
    """The two factors of one layer's weight update: W' = W + (alpha / rank) up @ down (Hu et al. 2021, Eq. 3).

    Attributes:
        down: A, (r, in), or (r, in, k, k) for a convolution.
        up: B, (out, r), or (out, r, 1, 1).
        alpha: numerator of the scale; equal to the rank if a file has none.
    """

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank

    def delta(self) -> torch.Tensor:
        """The weight update, (out, in) or (out, in, k, k)."""
        flat = self.scale * (self.up.flatten(1) @ self.down.flatten(1))
        return flat.view(self.up.shape[0], *self.down.shape[1:])


Lora = Mapping[str, LoraLayer]
"""Layer path in diffusers' UNet naming -> factors."""
