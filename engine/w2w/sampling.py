"""New models from a space: Gaussian coefficients, truncated, conditioned on wanted attributes, and their neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..config import Config
from ..errors import refuse
from .directions import Space, named

RNGS, ATTRIBUTES = ("vector", "official"), ("gaussian", "joined")


@dataclass(frozen=True)
class SampleConfig(Config):
    """How models are drawn.

    Attributes:
        factor: multiplies the deviations; 1 is the training set's spread, 0 the mean model.
        components: the first ones to draw; the rest stay at the mean. None: a third of the number of models, beyond
            which independent Gaussians are mostly noise.
        truncation: numbers beyond this many deviations are drawn again; None draws from the whole Gaussian.
        rng: ``vector`` draws all numbers at once; ``official`` one by one, as the published code does.
        attributes: ``gaussian`` as in the paper; ``joined`` takes what a random training model has along the space's
            named directions, all together, and draws the rest. Attributes one has or has not (glasses) make the
            training models fall into groups, and a Gaussian draws most models between them, where they are nobody.
        emphasis: multiplies what is joined: the directions are linear, and say a little less than the models do.
        inherit: correlation of the rest with the same training model's, joined only. What directions cannot say of an
            attribute, as they are linear, then comes along; 0 draws all of the rest, 1 takes the training model.
    """

    factor: float = 1.0
    components: int | None = None
    truncation: float | None = None
    rng: str = "vector"
    attributes: str = "gaussian"
    emphasis: float = 1.0
    inherit: float = 0.0

    def __post_init__(self) -> None:
        if self.rng not in RNGS:
            raise refuse("rng", self.rng, RNGS, "vector is faster")
        if self.attributes not in ATTRIBUTES:
            raise refuse("attributes", self.attributes, ATTRIBUTES, "joined needs a space with directions")
        if self.factor < 0 or self.emphasis < 0 or (self.components is not None and self.components < 1):
            given = (self.factor, self.emphasis, self.components)
            raise refuse("factor, emphasis, components", given, "0 or more, 1 or more", "1.0, 1.0, None are usual")
        if not 0 <= self.inherit < 1:
            raise refuse("inherit", self.inherit, "0 up to 1, a correlation", "at 1 it would be the training model")
        if self.truncation is not None and self.truncation <= 0.1:
            raise refuse("truncation", self.truncation, "above 0.1 deviations", "2 trims the rarest models")


def sample(space: Space, seeds: Sequence[int], config: SampleConfig | None = None) -> torch.Tensor:
    """(len(seeds), K) coefficients; row i depends on ``seeds[i]`` only."""
    config = config or SampleConfig()
    used = min(config.components or max(1, space.count // 3), space.dimension)
    out = torch.zeros(len(seeds), space.dimension)
    for row, seed in enumerate(seeds):
        # weights2weights, section 3.2: beta_k ~ N(mu_k, sigma_k^2); mu = 0, as the training data are centred
        out[row, :used] = config.factor * space.deviations[:used] * _normal(used, int(seed), config)
    return _joined(space, out, seeds, config) if config.attributes == "joined" else out


def _joined(space: Space, drawn: torch.Tensor, seeds: Sequence[int], config: SampleConfig) -> torch.Tensor:
    """Within the span of the named directions, each row becomes a random training model's; outside, a little."""
    if not space.directions or not len(space.coefficients):
        raise refuse("attributes", "joined", "a space with directions and its models' coefficients", "use gaussian")
    basis, _ = torch.linalg.qr(torch.stack([d.float() for d in space.directions.values()], 1))
    draws = [torch.Generator().manual_seed(int(seed) ^ 0x5EED) for seed in seeds]
    donors = [int(torch.randint(len(space.coefficients), (1,), generator=g)) for g in draws]
    theirs = space.coefficients[donors].float()
    rest = math.sqrt(1 - config.inherit**2) * drawn + config.inherit * theirs
    gaps = config.emphasis * theirs - rest
    return rest + torch.stack([basis @ (basis.T @ gap.clone()) for gap in gaps])  # row by row: rounding knows no batch


def _normal(count: int, seed: int, config: SampleConfig) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if config.rng == "official":  # a scalar loop draws other numbers than one call does
        return torch.cat([torch.randn(1, generator=random) for _ in range(count)])
    found = torch.randn(count, generator=random)
    while config.truncation is not None and bool((far := found.abs() > config.truncation).any()):
        found[far] = torch.randn(int(far.sum()), generator=random)
    return found


def conditioned(space: Space, coefficients: torch.Tensor, wanted: Mapping[str, float]) -> torch.Tensor:
    """Coefficients (..., K) moved to wanted scores (label -> deviations) by the least change in Mahalanobis length.

    The Gaussian's conditional mean shift: beta + C N (N^T C N)^-1 (y* - N^T beta), C = diag(sigma^2).
    """
    if not wanted:
        return coefficients
    directions = torch.stack([named(space, label).double() for label in wanted], 1)
    scale = (directions * directions).sum(0)  # scores are measured along d / |d|^2, see directions.score
    normals, target = directions / scale, torch.tensor(list(wanted.values()), dtype=torch.float64)
    spread = (space.deviations.double() ** 2)[:, None] * normals
    gap = target - coefficients.double() @ normals
    return (coefficients.double() + gap @ torch.linalg.inv(normals.T @ spread) @ spread.T).float()


@dataclass(frozen=True)
class Neighbour:
    """A training model near a given one; ``cosine`` of coefficients (the paper's measure), ``name`` of its file."""

    name: str
    cosine: float
    index: int


def nearest(space: Space, coefficients: torch.Tensor, count: int = 1) -> list[list[Neighbour]]:
    """For each row of (B, k) the ``count`` training models with the highest cosine (section 4.2, appendix A)."""
    k = coefficients.shape[-1]
    rows = torch.nn.functional.normalize(coefficients.float().reshape(-1, k), dim=1)
    known = torch.nn.functional.normalize(space.coefficients[:, :k].float(), dim=1)
    found = (rows @ known.T).topk(min(count, len(known)), dim=1)
    names = space.names or tuple(str(i) for i in range(space.count))
    return [
        [Neighbour(names[i], round(float(c), 4), int(i)) for c, i in zip(cosines, indices, strict=True)]
        for cosines, indices in zip(found.values.tolist(), found.indices.tolist(), strict=True)
    ]


def closeness(space: Space, components: int | None = None, percentile: float = 0.95) -> float:
    """The cosine that this share of training models keep below with their own nearest training model.

    A sampled model above it stands closer to somebody of the training set than they do to each other.
    """
    rows = torch.nn.functional.normalize(space.coefficients[:, :components].float(), dim=1)
    cosines = rows @ rows.T
    cosines.fill_diagonal_(-1)
    return float(torch.quantile(cosines.max(1).values, percentile))
