"""Sliders as people write them: a label and a number each."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...errors import refuse


def sliders_of(texts: Iterable[str], sign: str) -> dict[str, float]:
    """Label -> number from texts such as ``beard: 2``; empty ones are left out.

    Args:
        sign: between the two, ``:`` in a node and ``=`` on the command line.
    """
    strengths: dict[str, float] = {}
    for text in filter(None, (text.strip() for text in texts)):
        label, _, number = text.rpartition(sign)
        try:
            strength = float(number)
        except ValueError:
            strength = math.nan
        if not label.strip() or not math.isfinite(strength) or label.strip() in strengths:
            example = "beard=2" if sign == "=" else "beard: 2"
            raise refuse("slider", text, f"label{sign}number, each label once", f"write {example}")
        strengths[label.strip()] = strength
    return strengths
