"""Bounds on layer sizes, to refuse damaged or malicious files."""

from __future__ import annotations

_UNET = ("down_blocks.", "up_blocks.", "mid_block.", "conv_", "time_", "add_")
_LARGEST_UNET, LARGEST = 1 << 26, 1 << 29
"""Most numbers in a weight: SDXL's refiner has 42 million in one layer, Flux.2 340 million."""


def most_numbers(path: str) -> int:
    """The largest size of a weight with this layer name in any model."""
    return _LARGEST_UNET if path.startswith(_UNET) else LARGEST


def layer_fits(path: str, numbers: int) -> bool:
    """Whether a layer's weight can have that many numbers."""
    return 0 < numbers <= most_numbers(path)
