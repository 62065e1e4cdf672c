"""Whether numbers are numbers, in one pass over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import refuse

if TYPE_CHECKING:
    import torch


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
