"""Tests whether raw LoRA factors are comparable: (A, B) and (cA, B / c) are the same LoRA.

PCA over factors, as in the paper, is meaningful for LoRAs trained from one initial A. LoRAs by different authors have
different ones; only their products B A are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...io.lora_layer import Lora

COSINE = 0.5
"""Factors share a gauge if the 5th percentile of cosines between two models' A factors is at least this. Independent
starts give 0 on average (standard deviation 0.18 at 32 inputs), a flipped sign gives -1."""
SPREAD = 3.0
"""Largest ratio between the 95th and 5th percentile of |A| in a layer: larger means that factors were rescaled."""


@dataclass(frozen=True)
class Gauge:
    """Result of the test.

    Attributes:
        cosine, low: median and 5th percentile of cosines between A factors, over layers and pairs of models.
        spread: largest ratio, over layers, between the 95th and 5th percentile of |A|.
    """

    cosine: float
    low: float
    spread: float

    @property
    def shared(self) -> bool:
        """Whether the factors of different models are comparable."""
        return self.low >= COSINE and self.spread <= SPREAD

    def reason(self) -> str:
        """The verdict in one line."""
        cosines = f"cosine of A between models {self.cosine:.2f}, 5th percentile {self.low:.2f}"
        if self.shared:
            return f"factors are comparable ({cosines})"
        if self.low < COSINE:
            # Independent starts and flipped signs give many negative cosines, training from one start few.
            moved = "moved far apart from one start" if self.low > 0 else "start differently"
            return f"factors {moved} ({cosines})"
        return f"factors are scaled differently (|A| varies {self.spread:.1f}-fold between models)"


def gauge_test(loras: Sequence[Lora], most: int = 48) -> Gauge:
    """Compares the down factors of up to ``most`` models, layer by layer, in pairs.

    Only layers that all models have with the same rank count; without any, factors are not comparable.
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
    pooled = torch.cat(cosines)
    pooled = pooled[:: max(1, len(pooled) // 1_000_000)]  # torch.quantile takes 16 million numbers at most
    return Gauge(float(pooled.median()), float(torch.quantile(pooled, 0.05)), max(spreads))
