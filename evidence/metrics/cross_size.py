"""Cross-size consistency: how much the image changes when only its size condition changes.

The paper's protocol (Berrada et al. 2024, 3.3: LPIPS between images of one seed and prompt under different size
conditions), with any distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...engine.errors import refuse
from ...engine.runtime.progress import Progress, silent

Size = tuple[int, int]
Sampler = Callable[[Size], torch.Tensor]
"""Size condition (height, width) -> images (B, C, H, W); seeds and prompts must be the same for every size."""
Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Two batches of one shape -> (B,) distances. For example LPIPS."""


@dataclass(frozen=True)
class CrossSizeResult:
    """Distances between the images of S size conditions.

    Attributes:
        sizes: the S size conditions.
        distances: (S, S, B) float64, symmetric, 0 on the diagonal.
    """

    sizes: tuple[Size, ...]
    distances: torch.Tensor

    @property
    def each(self) -> torch.Tensor:
        """(B,) mean over all pairs of sizes, for each image."""
        upper = torch.triu_indices(len(self.sizes), len(self.sizes), 1)
        return self.distances[upper[0], upper[1]].mean(0)

    @property
    def mean(self) -> float:
        """Mean over pairs and images; 0 if the size condition has no effect."""
        return float(self.each.mean())


def rms_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of each pair of images: (B,), in the unit of the images."""
    return (a.double() - b.double()).flatten(1).pow(2).mean(1).sqrt()


@torch.no_grad()
def cross_size_consistency(
    sampler: Sampler, sizes: Sequence[Size], distance: Distance = rms_distance, progress: Progress = silent
) -> CrossSizeResult:
    """Distances between the images of every two size conditions.

    Images of different resolution are area-averaged to the smallest.
    """
    if len(sizes) < 2 or len(set(sizes)) != len(sizes):
        raise refuse("sizes", list(sizes), "two or more, each once", "for example (256, 256), (512, 512), (1024, 1024)")
    pictures = []
    for i, size in enumerate(sizes):
        pictures.append(sampler(size))
        progress(i + 1, len(sizes), None)
    counts = [len(p) for p in pictures]
    if len(set(counts)) != 1:
        raise refuse("pictures", counts, "the same number at each size", "sample the same seeds at each size")
    pictures = _same_shape(pictures)
    distances = torch.zeros(len(sizes), len(sizes), counts[0], dtype=torch.float64)
    for i in range(len(sizes)):
        for j in range(i):
            distances[i, j] = distances[j, i] = distance(pictures[i], pictures[j]).cpu().double()
    return CrossSizeResult(tuple(sizes), distances)


def _same_shape(pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    height, width = (min(p.shape[k] for p in pictures) for k in (-2, -1))
    return [
        p if p.shape[-2:] == (height, width) else functional.interpolate(p, (height, width), mode="area")
        for p in pictures
    ]
