"""Classifier-free guidance, and its scale at other resolutions."""

from __future__ import annotations

import math

import torch

from ..errors import refuse


def guide(null: torch.Tensor, full: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance between two predictions of one shape; ``scale`` 0 gives ``null``, 1 about ``full``.

    The form gives ``null`` itself, bit for bit, where both predictions are equal. Callers skip the evaluation of
    ``null`` at scale 1.
    """
    # Ho & Salimans 2022, Eq. 6, with their w = scale - 1
    return null + scale * (full - null)


def scale_for_size(scale: float, ratio: float) -> float:
    """The guidance scale for pictures ``ratio`` times the resolution that ``scale`` was chosen for."""
    if not (math.isfinite(ratio) and ratio > 0):
        raise refuse("size ratio", ratio, "a number above 0", "2.0 for 512 after 256")
    # Berrada et al. 2024, Eq. 4: lambda'(s) = 1 + s (lambda - 1)
    return 1 + ratio * (scale - 1)
