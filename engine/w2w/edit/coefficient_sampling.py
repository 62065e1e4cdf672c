"""New models of a space: Gaussian coefficients, truncated or conditioned on attributes, and neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ...diffusion.noise import generators
from ...errors import refuse
from ...settings.w2w_options import SampleConfig
from ..space.delta_space import Space, member_names
from ..space.directions import direction_named, labelled

S = TypeVar("S", bound=Space)


def sample(space: Space, seeds: Sequence[int], config: SampleConfig | None = None) -> torch.Tensor:
    """(len(seeds), K) coefficients; row i depends on ``seeds[i]`` only.

    Args:
        config: None takes the space's, see :func:`usual_sampling`.
    """
    if not len(seeds):
        raise refuse("seeds", "none", "one or more", "give one for each model")
    config = config or usual_sampling(space)
    if config.spread and not bool(space.deviations.any()):
        remedy = "import it again with proj_1000pc.pt next to the other files, or sample with spread 0, the mean model"
        raise refuse("space", "without the spread of its models", "a space to sample from", remedy)
    used = min(config.components or max(1, space.count // 3), space.dimension)
    sampled = torch.zeros(len(seeds), space.dimension)
    for row, random in enumerate(generators(seeds)):
        # weights2weights, section 3.2: beta_k ~ N(mu_k, sigma_k^2); mu = 0, as the training data are centred
        sampled[row, :used] = config.spread * space.deviations[:used] * _normal(used, random, config)
    named = bool(labelled(space)) and len(space.coefficients) > 0 and config.rng == "vector"
    joined = config.attributes == "joined" or (config.attributes == "auto" and named)
    return _joined(space, sampled, seeds, config) if joined else sampled


def usual_sampling(space: Space, **settings: Any) -> SampleConfig:
    """The default sampling settings of a space, from its file, in every interface.

    Args:
        given: settings of :class:`SampleConfig` that replace the space's; None keeps one.
    """
    usual = SampleConfig.from_dict(space.info.get("sampling", {}))
    return replace(usual, **{name: value for name, value in settings.items() if value is not None})


def with_sampling(space: S, config: SampleConfig) -> S:
    """The space with default sampling settings, which its file stores."""
    return replace(space, info={**space.info, "sampling": config.to_dict()})


def _joined(space: Space, sampled: torch.Tensor, seeds: Sequence[int], config: SampleConfig) -> torch.Tensor:
    """Replaces each row within the span of named directions by a random training model's; mixes a little elsewhere."""
    if not labelled(space) or not len(space.coefficients):
        raise refuse("attributes", "joined", "a space with directions and its models' coefficients", "use gaussian")
    basis, _ = torch.linalg.qr(torch.stack([d.float() for d in labelled(space).values()], 1))
    random = generators([int(seed) ^ 0x5EED for seed in seeds])
    donors = space.coefficients[
        [int(torch.randint(len(space.coefficients), (1,), generator=g)) for g in random]
    ].float()
    donors = config.spread * torch.nn.functional.pad(donors, (0, space.dimension - donors.shape[1]))
    mixed = math.sqrt(1 - config.inherit**2) * sampled + config.inherit * donors
    differences = config.emphasis * donors - mixed
    # row by row, so that rounding does not depend on the batch
    return mixed + torch.stack([basis @ (basis.T @ row.clone()) for row in differences])


def _normal(count: int, random: torch.Generator, config: SampleConfig) -> torch.Tensor:
    if config.rng == "official":  # a scalar loop samples other numbers than one call
        return torch.cat([torch.randn(1, generator=random) for _ in range(count)])
    values = torch.randn(count, generator=random)
    while config.truncation is not None and bool((far := values.abs() > config.truncation).any()):
        values[far] = torch.randn(int(far.sum()), generator=random)
    return values


def conditioned(space: Space, coefficients: torch.Tensor, targets: Mapping[str, float]) -> torch.Tensor:
    """Coefficients (..., K) moved to ``wanted`` scores (label -> deviations) by the shortest Mahalanobis step."""
    if not targets:
        return coefficients
    for label, value in targets.items():
        if not abs(value) < 1000:
            raise refuse(f"score of {label}", value, "-1000 .. 1000 deviations", "the training models span +-3")
    directions = torch.stack([direction_named(space, label).double() for label in targets], 1)
    scale = (directions * directions).sum(0)  # scores are measured along d / |d|^2, see directions.score
    normals, target = directions / scale, torch.tensor(list(targets.values()), dtype=torch.float64)
    spread = (space.deviations.double() ** 2)[:, None] * normals
    row = target - coefficients.double() @ normals
    # conditional mean of a Gaussian: beta + C N (N^T C N)^-1 (y* - N^T beta), C = diag(sigma^2)
    return (coefficients.double() + row @ torch.linalg.inv(normals.T @ spread) @ spread.T).float()


@dataclass(frozen=True)
class Neighbour:
    """A training model near another: its file's name, cosine of coefficients (the paper's measure), and index."""

    name: str
    cosine: float
    index: int


def nearest(space: Space, coefficients: torch.Tensor, count: int = 1) -> list[list[Neighbour]]:
    """For each model of (B, k), the ``count`` training models with the highest cosine (section 4.2, appendix A).

    Empty lists if the space has no coefficients of its models; only leading ones are compared if it has these.
    """
    rows = coefficients.float().reshape(-1, coefficients.shape[-1])
    k = min(rows.shape[1], space.coefficients.shape[1])
    rows = torch.nn.functional.normalize(rows[:, :k], dim=1)
    known = torch.nn.functional.normalize(space.coefficients[:, :k].float(), dim=1)
    best = (rows @ known.T).topk(min(count, len(known)), dim=1)
    names = member_names(space)
    return [
        [Neighbour(names[i], round(float(c), 4), int(i)) for c, i in zip(cosines, indices, strict=True)]
        for cosines, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def closeness(space: Space, components: int | None = None, percentile: float = 0.95) -> float:
    """The given percentile (0 .. 1) of the training models' cosine to their nearest neighbour.

    A sampled model above it is closer to a training model than these are to each other. 1 if the space has no
    coefficients of its models.
    """
    if len(space.coefficients) < 2:
        return 1.0
    rows = torch.nn.functional.normalize(space.coefficients[:, :components].float(), dim=1)
    cosines = rows @ rows.T
    cosines.fill_diagonal_(-1)
    return float(torch.quantile(cosines.max(1).values, percentile))
