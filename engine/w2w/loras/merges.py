"""Detects LoRAs that are a merge of others: a weighted sum of their weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .near_copies import NEAR

MOST, LEAST = 4, 0.05
"""Most parts of a merge, and the smallest weight of a part."""
RESIDUAL = 0.2
"""|LoRA - weighted sum| over |LoRA| below which it counts as a merge: re-factored merges are inexact."""


@dataclass(frozen=True)
class Merge:
    """A LoRA as a weighted sum of others.

    Attributes:
        name: of the LoRA.
        parts: (name, weight) of each part, the largest first.
        residual: |LoRA - sum| / |LoRA|.
    """

    name: str
    parts: tuple[tuple[str, float], ...]
    residual: float

    def __str__(self) -> str:
        terms = " + ".join(f"{weight:.2f} {name}" for name, weight in self.parts)
        return f"{self.name} is {terms}, except for {self.residual:.0%}"


def merge_of(row: torch.Tensor, others: torch.Tensor, name: str, names: Sequence[str]) -> Merge | None:
    """The weighted sum of at most ``MOST`` other LoRAs that is nearest to a LoRA; None if it is not a merge.

    Orthogonal matching pursuit (Pati et al. 1993): the LoRA most similar to the residual is added, then all weights are
    refitted by least squares.

    Args:
        row: (D,) the LoRA's sketch (see :func:`~.near_copies.sketch`).
        others: (N, D) the sketches of the others, without copies of it.
    """
    length, lengths = float(row.norm()), others.norm(dim=1)
    usable = (lengths > 0).nonzero()[:, 0].tolist()
    if not length or len(usable) < 2:
        return None
    target, table = row.double(), others.double()
    chosen: list[int] = []
    weights, missing = torch.zeros(0, dtype=torch.float64), target
    while len(chosen) < min(MOST, len(usable)) and float(missing.norm()) > NEAR / 10 * length:
        alike = (table @ missing).abs() / lengths.double().clamp_min(1e-30)
        alike[[i for i in range(len(table)) if i not in usable or i in chosen]] = -1
        chosen.append(int(alike.argmax()))
        weights = torch.linalg.lstsq(table[chosen].T, target[:, None]).solution[:, 0]
        missing = target - weights @ table[chosen]
    residual = float(missing.norm()) / length
    # the contribution of each weight, relative to the LoRA's norm
    sizes = weights.abs() * lengths[chosen].double() / length
    parts = sorted(zip(chosen, weights.tolist(), sizes.tolist(), strict=True), key=lambda part: -part[2])
    named = tuple((names[i], round(w, 3)) for i, w, size in parts if size >= LEAST)
    return Merge(name, named, round(residual, 4)) if residual <= RESIDUAL and len(named) > 1 else None
