"""Frechet distance between two sets of features (Heusel et al. 2017, Eq. 6), without torch-fidelity or scipy."""

from __future__ import annotations

import torch

from ...engine.errors import refuse


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)) for features (N, D) and (M, D), in float64.

    tr (A B)^(1/2) is taken as the sum of the singular values of A^(1/2) B^(1/2), which stays real for singular
    covariances.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise refuse("features", (tuple(a.shape), tuple(b.shape)), "(N, D) and (M, D) with N, M >= 2", "stack features")
    (mu_a, root_a, trace_a), (mu_b, root_b, trace_b) = (_moments(x.double()) for x in (a, b))
    cross = torch.linalg.svdvals(root_a @ root_b).sum()
    return float((mu_a - mu_b).square().sum() + trace_a + trace_b - 2 * cross)


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    covariance = torch.cov(x.T)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return x.mean(0), root, covariance.trace()
