"""Can raw LoRA factors be compared at all? (A, B) and (cA, B / c) are the same LoRA, so only a shared start fixes them.

PCA over factors, as in the paper, is meaningful for LoRAs trained from one and the same initial A. Files from different
people are not; their products B A are comparable whatever the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .manifest import Lora

COSINE = 0.5
"""Least 5th percentile of cosines between the A factors of two models for them to count as one gauge. Independent
starts give 0 on average (0.18 deviation at 32 inputs); a flipped sign gives -1."""
SPREAD = 3.0
"""Largest ratio between the 95th and 5th percentile of |A| in a layer: more means factors were rescaled."""


@dataclass(frozen=True)
class Gauge:
    """Result of the test. ``cosine``: median over layers and pairs of models; ``low``: their 5th percentile."""

    cosine: float
    low: float
    spread: float

    @property
    def shared(self) -> bool:
        """Do the factors of different models mean the same."""
        return self.low >= COSINE and self.spread <= SPREAD

    def reason(self) -> str:
        """One line to print."""
        said = f"cosine of A between models {self.cosine:.2f}, 5th percentile {self.low:.2f}"
        if self.shared:
            return f"factors are comparable ({said})"
        if self.low < COSINE:
            return f"factors start differently ({said})"
        return f"factors are scaled differently (|A| varies {self.spread:.1f}-fold between models)"


def gauge_test(loras: Sequence[Lora], most: int = 48) -> Gauge:
    """Compare the down factors of up to ``most`` models, layer by layer, in pairs.

    Each layer that all these models have with one rank counts; without such a layer nothing is comparable.
    """
    chosen = [loras[i] for i in torch.linspace(0, len(loras) - 1, min(most, len(loras))).round().long().tolist()]
    cosines, spreads = [], []
    shared = set(chosen[0]).intersection(*map(set, chosen[1:]))
    for path in sorted(shared):
        if len({x[path].down.shape for x in chosen}) > 1:
            continue
        rows = torch.stack([x[path].down.reshape(-1).double() for x in chosen])
        lengths = rows.norm(dim=1)
        unit = rows / lengths.clamp_min(1e-30)[:, None]
        pairs = torch.triu_indices(len(rows), len(rows), 1)
        cosines.append((unit @ unit.T)[pairs[0], pairs[1]])
        q = torch.tensor([0.05, 0.95], dtype=torch.float64)
        low, high = torch.quantile(lengths, q).tolist()
        spreads.append(high / max(low, 1e-30))
    if not cosines:
        return Gauge(0.0, 0.0, 1.0)
    every = torch.cat(cosines)
    every = every[:: max(1, len(every) // 1_000_000)]  # torch.quantile takes 16 million numbers at most
    return Gauge(float(every.median()), float(torch.quantile(every, 0.05)), max(spreads))
