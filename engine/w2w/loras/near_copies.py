"""Detects near-duplicate LoRAs in any key format, and estimates a folder's variance by direction.

A LoRA's weight updates are too large for direct comparison. Random projections from both sides, the same
for all LoRAs, keep inner products and distances on average (Johnson & Lindenstrauss 1984), and those of copies exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...io.lora_layer import Lora

SAME, NEAR = 1e-4, 0.1
"""Relative distance below which two LoRAs count as near-duplicates: half precision changes a LoRA by 0.001,
another epoch of one training by a few hundredths."""


@dataclass(frozen=True)
class Copy:
    """Two near-duplicate LoRAs.

    Attributes:
        first, second: their names.
        distance: |difference of the weight updates| over the larger norm.
    """

    first: str
    second: str
    distance: float

    def __str__(self) -> str:
        kind = "the same weights" if self.distance < SAME else f"nearly the same, {self.distance:.1%} apart"
        return f"{self.first} and {self.second}: {kind}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "same": self.distance < SAME}


def sketch(lora: Lora, shapes: Mapping[str, tuple[int, ...]], side: int) -> torch.Tensor:
    """(len(shapes) side^2,) L dW R of each layer, zero if the LoRA lacks the layer; exact for small layers.

    Args:
        shapes: layer path -> (out, in), in the order of the numbers.
        side: rows of L and columns of R, Gaussian with variance 1 / side and seeded by the layer's name.
    """
    parts = []
    for path, (height, width) in shapes.items():
        part = torch.zeros(side, side)
        if path in lora:
            layer = lora[path]
            left, right = _projection(path, height, side), _projection(path + "^T", width, side)
            product = (left @ (layer.up.flatten(1) * layer.scale)) @ (layer.down.flatten(1) @ right.T)
            part[: len(left), : len(right)] = product
        parts.append(part.flatten())
    return torch.cat(parts)


def _projection(name: str, length: int, side: int) -> torch.Tensor:
    if length <= side:
        return torch.eye(length)
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(side, length, generator=random) / side**0.5


def near_copies(rows: torch.Tensor, names: Sequence[str], near: float = NEAR, most: int = 100) -> list[Copy]:
    """Pairs of rows (N, D) with a relative distance below ``near``, nearest first, at most ``most``."""
    return sorted(_pairs(rows, names, near), key=lambda pair: pair.distance)[:most]


def _pairs(rows: torch.Tensor, names: Sequence[str], near: float) -> Iterator[Copy]:
    lengths = rows.norm(dim=1)
    for start in range(0, len(rows), 256):
        block = slice(start, start + 256)
        longer = torch.maximum(lengths[block, None], lengths[None])
        # |a|^2 + |b|^2 - 2 a b is too inexact to identify copies: it only selects candidates
        squares = lengths[block, None] ** 2 + lengths[None] ** 2 - 2 * rows[block] @ rows.T
        close = squares <= (near * 1.01 * longer) ** 2 + 1e-5 * longer**2
        for i, j in (close & (longer > 0)).nonzero().tolist():
            distance = float((rows[start + i] - rows[j]).norm() / longer[i, j])
            if start + i < j and distance <= near:
                yield Copy(names[start + i], names[j], round(distance, 6))


def variance_fractions(rows: torch.Tensor) -> torch.Tensor:
    """(N - 1,) fraction of the variance of rows (N, D) per principal component, largest first; zeros if equal."""
    centred = (rows - rows.mean(0)).double()
    values = torch.linalg.eigvalsh(centred @ centred.T).flip(0)[:-1].clamp_min(0)
    return (values / values.sum().clamp_min(1e-300)).float()
