"""Sizes of pictures in pixels, checked before any work."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import refuse

LARGEST_SIDE = 65536


def is_side(side: Any) -> bool:
    """Whether a value is a whole number of pixels from 1 to 65536; numpy's integers are, texts and booleans are not."""
    try:
        return not isinstance(side, bool) and 1 <= operator.index(side) <= LARGEST_SIDE
    except TypeError:
        return False


def check_sides(what: str, *sides: Any) -> None:
    """Refuses sides that are no whole pixels; None passes, where a default takes its place.

    Raises:
        VitrineError: If a side is no whole number from 1 to 65536.
    """
    if not all(side is None or is_side(side) for side in sides):
        shown = sides[0] if len(sides) == 1 else sides
        raise refuse(what, shown, f"whole pixels from 1 to {LARGEST_SIDE}", "leave it out for the model's own")
