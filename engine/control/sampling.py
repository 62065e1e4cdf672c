"""What both doors need to sample under Eq. 2 in as few network rows as possible."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .guidance import GuidanceConfig, guide

Key = tuple[bool, bool]
"""(with control, with semantics)."""


class ControlStep(NamedTuple):
    """One network call: its timestep, sigma, weight gamma (the largest of its rows), and evaluations a picture."""

    t: float
    sigma: float
    gamma: float
    evaluations: int


def needed(config: GuidanceConfig, weight: float = 1.0, high_is_null: bool = False) -> tuple[Key, ...]:
    """The evaluations :func:`guide` will ask for, to be made as one batch, the unconditional first."""
    asked: list[Key] = []

    def note(control: bool, semantics: bool) -> torch.Tensor:
        asked.append((control, semantics))
        return torch.zeros(())

    guide(note, config, weight, high_is_null)
    return tuple(sorted(asked))
