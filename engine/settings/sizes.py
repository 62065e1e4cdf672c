"""Checks of image sizes in pixels."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import refuse

LARGEST_SIDE = 65536


def is_side(side: Any) -> bool:
    """Whether a value is a whole number of pixels from 1 to 65536; also numpy's integers, not texts or booleans."""
    try:
        return not isinstance(side, bool) and 1 <= operator.index(side) <= LARGEST_SIDE
    except TypeError:
        return False


def check_sides(what: str, *sides: Any) -> None:
    """Refuses sides that are not whole pixels; None is accepted, for a default."""
    if not all(side is None or is_side(side) for side in sides):
        shown = sides[0] if len(sides) == 1 else sides
        raise refuse(what, shown, f"whole pixels from 1 to {LARGEST_SIDE}", "leave it out for the model's own")
