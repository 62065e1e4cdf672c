"""Noise per image: row i depends on its own seed and on nothing else in the batch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from ..errors import refuse


def seeds_of(seeds: int | Iterable[int]) -> list[int]:
    """Seeds as a list; one number is a list of one."""
    try:
        return [operator.index(seed) for seed in ([seeds] if isinstance(seeds, int) else seeds)]
    except TypeError:
        shown = seeds if isinstance(seeds, str) else type(seeds).__name__
        raise refuse("seeds", shown, "whole numbers", "e.g. seeds=[0, 1]") from None


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator for each seed, as diffusers' ``generator`` argument takes them."""
    for seed in seeds:
        if not -(2**63) <= int(seed) < 2**64:
            raise refuse("seed", seed, "-2**63 to 2**64 - 1", "choose a smaller one")
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def seeded_noise(seeds: Sequence[int], shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(B, *shape) standard normal noise on the CPU, sampled row by row."""
    return RowNoise(seeds)(shape, dtype)


class RowNoise:
    """Samples standard normal noise repeatedly, each batch row from its own generator."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._rows = generators(seeds)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(B, *shape) on the CPU; ``shape`` is that of one row."""
        return torch.stack([torch.randn(*shape, generator=row, dtype=dtype) for row in self._rows])

    def like(self, batch: torch.Tensor) -> torch.Tensor:
        """Noise of the shape, dtype and device of a batch with as many rows as there are seeds."""
        return self(batch.shape[1:], batch.dtype).to(batch.device)
