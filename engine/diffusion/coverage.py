"""Precision and recall of samples in a feature space (Kynkaanniemi et al. 2019, Eq. 1 and 2)."""

from __future__ import annotations

import torch

from ..errors import refuse


def precision_recall(real: torch.Tensor, samples: torch.Tensor, k: int = 3) -> tuple[float, float]:
    """(fraction of samples near real data, fraction of real data near samples), both in [0, 1].

    A point is near a set if some point of that set is closer to it than to its own k-th nearest neighbour.

    Args:
        real, samples: (N, D) and (M, D) features, N and M above k.
    """
    if real.ndim != 2 or samples.ndim != 2 or real.shape[1] != samples.shape[1] or min(len(real), len(samples)) <= k:
        shapes = (tuple(real.shape), tuple(samples.shape), k)
        raise refuse("features", shapes, "(N, D) and (M, D) with more than k samples", "take more samples")
    return _inside(samples, real, k), _inside(real, samples, k)


def _inside(points: torch.Tensor, manifold: torch.Tensor, k: int) -> float:
    a, b = points.double(), manifold.double()
    # The point itself is the nearest, at distance 0
    radius = torch.cdist(b, b).kthvalue(k + 1, dim=1).values
    return float((torch.cdist(a, b) <= radius).any(1).double().mean())
