"""Fine detail of an image."""

from __future__ import annotations

import torch
from torch.nn import functional


def fine_detail(images: torch.Tensor) -> torch.Tensor:
    """(N,) of (N, C, H, W): mean square of the difference after halving and enlarging each image."""
    halved = functional.interpolate(functional.avg_pool2d(images, 2), scale_factor=2.0, mode="bilinear")
    return (images - halved).square().flatten(1).mean(1)
