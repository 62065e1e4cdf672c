"""Where a slider ends, and the strengths between which an attribute's classifier reading rises evenly.

An attribute that is present or absent appears suddenly, at a different strength for each person, so a slider that is
even in strength has no effect over a wide range. A map gives the strength of each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import refuse

POSITIONS = 5
"""Number of even positions of a fitted map, including its ends."""


@dataclass(frozen=True)
class StrengthMap:
    """The strengths at even positions of one slider.

    Attributes:
        strengths: at positions 0, 1 / (n - 1), ... 1, in deviations; starting at 0, ascending.
        start: timestep from which the edit was applied in the fit, see ``EditConfig``.
    """

    strengths: tuple[float, ...]
    start: float = 1000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strengths", tuple(map(float, self.strengths)))
        steps = list(zip(self.strengths, self.strengths[1:], strict=False))
        if not steps or self.strengths[0] != 0 or not all(0 <= a <= b < 1000 for a, b in steps):
            raise refuse("strength map", self.strengths, "two or more numbers rising from 0", "fit it again")

    def at(self, position: float) -> float:
        """The strength at a position 0 .. 1, linearly interpolated."""
        if not 0 <= position <= 1:
            raise refuse("slider position", position, "0 .. 1", "a position is a fraction of the slider")
        scaled = position * (len(self.strengths) - 1)
        i = min(int(scaled), len(self.strengths) - 2)
        return self.strengths[i] + (scaled - i) * (self.strengths[i + 1] - self.strengths[i])


def fit_strengths(strengths: Sequence[float], readings: Sequence[float], start: float = 1000.0) -> StrengthMap:
    """Fits a map whose :data:`POSITIONS` divide the rise of a reading evenly.

    Readings are made monotone by least squares first, so that noise does not reverse a slider.

    Args:
        strengths: ascending from 0.
        readings: mean classifier reading at each strength, such as a probability, over the people of the fit.
        start: timestep from which the edit was applied.
    """
    if len(strengths) != len(readings):
        raise refuse("readings", len(readings), f"{len(strengths)}, one per strength", "measure each strength once")
    StrengthMap(tuple(strengths))  # raises unless strengths rise from 0
    curve = _monotone(readings)
    if not curve[-1] - curve[0] > 0.01:
        shown = f"{curve[0]:.3f} .. {curve[-1]:.3f}"
        raise refuse("readings", shown, "a rise of 0.01 or more", "the direction has no effect: train another")
    levels = [curve[0] + (curve[-1] - curve[0]) * i / (POSITIONS - 1) for i in range(1, POSITIONS)]
    return StrengthMap((0.0, *(_reached(strengths, curve, level) for level in levels)), start)


def _monotone(values: Sequence[float]) -> list[float]:
    """The ascending sequence nearest in squares: max over j <= i of min over k >= i of the mean of j .. k."""
    n = len(values)

    # Barlow et al. 1972, the min-max form of isotonic regression
    def mean(j: int, k: int) -> float:
        return sum(values[j : k + 1]) / (k + 1 - j)

    return [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


def _reached(strengths: Sequence[float], curve: Sequence[float], level: float) -> float:
    """The first strength at which an ascending curve reaches a level."""
    i = next((i for i in range(1, len(curve)) if curve[i] >= level - 1e-9), len(curve) - 1)
    rise = curve[i] - curve[i - 1]
    t = min(1.0, max(0.0, (level - curve[i - 1]) / rise)) if rise > 0 else 1.0
    return strengths[i - 1] + t * (strengths[i] - strengths[i - 1])
