"""How large a layer can be: a file that says more of one is damaged, or meant to fill the memory."""

from __future__ import annotations

_UNET = ("down_blocks.", "up_blocks.", "mid_block.", "conv_", "time_", "add_")
_LARGEST_UNET, LARGEST = 1 << 26, 1 << 29
"""Numbers in a weight: SDXL's refiner has 42 million in one layer, Flux.2 340 million."""


def most_numbers(path: str) -> int:
    """The most numbers that the weight of a layer of this name has in any model."""
    return _LARGEST_UNET if path.startswith(_UNET) else LARGEST


def layer_fits(path: str, numbers: int) -> bool:
    """Whether the weight of a layer can have so many numbers."""
    return 0 < numbers <= most_numbers(path)
