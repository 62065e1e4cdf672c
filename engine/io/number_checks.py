"""Whether numbers are numbers, in one pass over them; and the one way to read an integer that a file gives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import refuse

if TYPE_CHECKING:
    import torch

LARGEST_INTEGER = 1 << 53
"""Largest integer that any file of ours has; sums of 1,000 of them fit into 64 bits."""
LARGEST_RANK = 1 << 20
LARGEST_SIDE = 1 << 29
"""Of a tensor's shape: the largest weights of any model have fewer numbers."""
_REMEDY = "make the file again, or download it again"


def integer(value: object, what: str, least: int = 0, most: int = LARGEST_INTEGER, remedy: str = _REMEDY) -> int:
    """An integer that a file gives, in its range; every reader calls this before it computes with one.

    Args:
        value: an int; a bool or a float is refused.
    """
    if type(value) is not int or not least <= value <= most:
        raise refuse(what, value, f"a whole number from {least} to {most}", remedy)
    return value


def integers(
    values: torch.Tensor, what: str, dtype: torch.dtype, least: int = 0, most: int = LARGEST_INTEGER
) -> torch.Tensor:
    """A file's integers as int64: of the dtype that is written, and each in its range.

    A sum or a product of unchecked integers wraps around, and then fits.
    """
    import torch

    if values.dtype != dtype:
        raise refuse(what, str(values.dtype), str(dtype), _REMEDY)
    wide = values.to(torch.int64)
    if wide.numel() and not (least <= int(wide.min()) and int(wide.max()) <= most):
        shown = f"{int(wide.min())} to {int(wide.max())}"
        raise refuse(what, shown, f"whole numbers from {least} to {most}", _REMEDY)
    return wide


def refuse_unless_finite(what: str, *numbers: float | None) -> None:
    """Refuses numbers that are NaN or infinite; None is skipped."""
    for number in numbers:
        if number is not None and not math.isfinite(number):
            raise refuse(what, number, "a finite number", "look at where it comes from")


def all_finite(values: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite; waits for the device.

    NaN and infinity outlast any addition, so a finite sum says it. A sum that overflows is followed by the extremes.
    """
    if not values.numel() or not values.is_floating_point():
        return True
    values = values.detach()
    values = values.float() if values.element_size() == 1 else values  # 8-bit floats have no sum
    return math.isfinite(float(values.sum())) or all(math.isfinite(float(extreme)) for extreme in values.aminmax())
