"""The receptive field of a UNet in larger images: dilates inner convolutions to see as much as in training.

A 3 x 3 convolution reaches one cell at any size, so in an image of twice the size the network sees half as much of it
and repeats objects: two heads. Dilated by two, it reaches as far as in training. The outermost level, which renders
edges and skin, keeps its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..runtime.compat_torch import PADDED_SIDES
from ..runtime.forward_hooks import block_of
from .undoable import Watched

RECEPTIVE = ("auto", "dilate", "none")
LEAST = {"dilate": 1.5, "auto": 1.75}
"""Times the trained side from which convolutions are spread: where they are spread unasked, later."""
MEASURED = {"attributes": (0.44, 0.96), "heads": (4.0, 1.0)}
"""Of ``results/resolution.receptive.json``, at twice the side from noise: untouched, and dilated."""


def steps_of(scales: tuple[float, float], least: float = LEAST["dilate"]) -> tuple[int, int]:
    """Dilation (rows, columns): the integers nearest to the scales.

    1, no dilation, for scales below ``least``.
    """
    rows, columns = (int(scale + 0.5) if scale >= least else 1 for scale in scales)
    return rows, columns


def is_convolutional(net: Any) -> bool:
    """Whether a network of either library is a UNet, which has no position encoding."""
    return hasattr(net, "down_blocks") or hasattr(net, "input_blocks")


def inner_convolutions(net: nn.Module) -> list[str]:
    """Paths of the 3 x 3 stride-1 convolutions in all but the outermost level of a UNet of either library.

    For SD1.x these are the ones that ScaleCrafter dilates at twice the size (He et al. 2024, arXiv 2310.07702: down
    1-3, middle, up 0-2); for SDXL it dilates fewer.
    """
    paths = []
    for prefix in _inner_blocks(net):
        for path, module in net.get_submodule(prefix).named_modules(prefix=prefix):
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and module.stride == (1, 1):
                paths.append(path)
    return paths


def _inner_blocks(net: Any) -> Iterator[str]:
    """Paths of the modules from the first downsampling to the last upsampling, inclusive."""
    if hasattr(net, "down_blocks"):
        yield from (f"down_blocks.{k}" for k in range(1, len(net.down_blocks)))
        if net.mid_block is not None:
            yield "mid_block"
        yield from (f"up_blocks.{k}" for k in range(len(net.up_blocks) - 1))
        return
    halvings = [k for k, block in enumerate(net.input_blocks) if any(_halves(m) for m in block.modules())]
    doublings = [k for k, block in enumerate(net.output_blocks) if any(_doubles(m) for m in block)]
    if not halvings:
        return
    yield from (f"input_blocks.{k}" for k in range(halvings[0], len(net.input_blocks)))
    yield "middle_block"
    yield from (f"output_blocks.{k}" for k in range(doublings[-1] + 1))


def _halves(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.stride == (2, 2)


def _doubles(module: nn.Module) -> bool:
    return type(module).__name__ == "Upsample"


class Spread(Watched):
    """Dilated convolutions from construction until :meth:`close`; no weight is changed.

    Args:
        net: a UNet of either library.
        step: (rows, columns) from :func:`steps_of`.
    """

    def __init__(self, net: nn.Module, step: tuple[int, int]) -> None:
        super().__init__("receptive field")
        first = {block_of(path): path for path in reversed(inner_convolutions(net))}
        for block, path in first.items():
            self.reached.through(net.get_submodule(path), block)
        self.reached.watch(net)
        for path in inner_convolutions(net):
            self._spread(net.get_submodule(path), step)

    def _spread(self, conv: Any, step: tuple[int, int]) -> None:
        # He et al. 2024 (ScaleCrafter), re-dilation: taps d cells apart, and padding that keeps the size
        rows, columns = step
        changes: dict[str, Any] = {"dilation": step, "padding": step, PADDED_SIDES: [columns, columns, rows, rows]}
        for name, value in changes.items():
            self._swap(conv, name, value)
