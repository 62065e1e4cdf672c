"""Principal components of many flat weight vectors: by column shards, in bounded memory, resumable.

The Gram route reads the data twice: once for mean, deviation and G = sum of Z_l Z_l^T over shards l, once for
V_l = Z_l^T Q / S. The randomised route never forms G and reads the data once more for each power iteration.
Shards depend on each other only through that sum, so they may be computed anywhere, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config import Config
from ..errors import refuse
from ..files import read_artefact, save_artefact
from ..progress import Progress, silent
from .manifest import Manifest
from .space import WeightSpace

ROUTES = ("auto", "gram", "randomised")
_STATE = "vitrine.w2w.pca"


@dataclass(frozen=True)
class Workers:
    """The processes that share a build.

    Attributes:
        index, count: this process's number, of how many.
        total: sums a tensor over all of them (all-reduce).
        meet: a barrier.
    """

    index: int = 0
    count: int = 1
    total: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
    meet: Callable[[], None] = lambda: None


ALONE = Workers()


class Columns(Protocol):
    """Data read by columns: N models of D numbers each."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        ...

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """(N, stop - start) float32."""
        ...


@dataclass(frozen=True)
class Matrix:
    """A matrix (N', D), in memory or memory-mapped; ``rows`` (N,) are the indices used, None uses all."""

    data: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        return len(self.data if self.rows is None else self.rows), self.data.shape[1]

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """(N, stop - start) float32."""
        shard = self.data[:, start:stop]
        return shard.float() if self.rows is None else shard[self.rows].float()


@dataclass(frozen=True)
class PCAConfig(Config):
    """How components are computed.

    Attributes:
        components: K, at most N - 1; None keeps every one with variance.
        route: ``gram`` (exact; best for N up to some ten thousand), ``randomised`` (large N, few components) or
            ``auto``: randomised where the Gram matrix would not fit into ``memory``.
        memory: bytes for shards and Gram matrix together.
        standardise: divide each number by its deviation, as the paper does.
        power, oversample, seed: of the randomised route: iterations, extra vectors, and its start.
    """

    components: int | None = None
    route: str = "auto"
    memory: int = 2 * 2**30
    standardise: bool = True
    power: int = 4
    oversample: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise refuse("route", self.route, ROUTES, "auto chooses")
        if self.components is not None and self.components < 1:
            raise refuse("components", self.components, "1 or more", "leave it out for all")
        if self.memory < 2**20:
            raise refuse("memory", self.memory, "2**20 bytes or more", "2 GiB suits most folders")
        if self.route == "randomised" and self.components is None:
            raise refuse("components", None, "a number with the randomised route", "1000 is the paper's")


@dataclass(frozen=True)
class Components:
    """Result: mean and scale (D,), basis (K, D), singular values (K,), coefficients (N, K), total variance."""

    mean: torch.Tensor
    scale: torch.Tensor
    basis: torch.Tensor
    singular_values: torch.Tensor
    coefficients: torch.Tensor
    total_variance: float

    def space(
        self, manifest: Manifest, names: tuple[str, ...] = (), info: Mapping[str, Any] | None = None
    ) -> WeightSpace:
        """The space they span."""
        return WeightSpace(
            manifest, self.mean, self.scale, self.basis, self.singular_values, self.coefficients,
            len(self.coefficients), names, {}, self.total_variance, dict(info or {}),
        )  # fmt: skip


def shards(n: int, d: int, memory: int) -> list[tuple[int, int]]:
    """Column ranges whose float32 shard and three float64 copies fit into half of ``memory``."""
    width = max(1, min(d, memory // 2 // (28 * n)))
    return [(start, min(start + width, d)) for start in range(0, d, width)]


def principal_components(
    data: Columns,
    config: PCAConfig | None = None,
    progress: Progress = silent,
    *,
    resume: str | Path | None = None,
    workers: Workers = ALONE,
) -> Components:
    """PCA of the (standardised) rows.

    Args:
        resume: a file that keeps the sums after each shard of the first pass; an interrupted run resumes from it.
        workers: the processes that share the shards; all return the same.

    Raises:
        VitrineError: If there are fewer than two models, more components than N - 1 are asked for, or all rows are
            equal.
    """
    config = config or PCAConfig()
    n, d = data.shape
    if n < 2:
        raise refuse("models", n, "two or more", "a space needs several LoRAs")
    if config.components is not None and config.components > n - 1:
        raise refuse("components", config.components, f"up to {n - 1} for {n} models", "leave it out for all")
    own_shards = [(a, b) for i, (a, b) in enumerate(shards(n, d, config.memory)) if i % workers.count == workers.index]
    gram = config.route == "gram" or (config.route == "auto" and 3 * 8 * n * n <= config.memory)
    if gram or config.components is None:
        sums = _first_pass(data, own_shards, config, progress, resume)
        sums = {name: workers.total(value) for name, value in sums.items()}
        values, vectors = top_components(sums["gram"], config.components)
    else:
        sums = {name: workers.total(value) for name, value in _moments(data, own_shards, config, progress).items()}
        values, vectors = _randomised(data, own_shards, sums, config, progress, workers)
    mean, scale = sums["mean"], sums["scale"]
    basis = torch.zeros(len(values), d)
    for start, stop in own_shards:
        z = _standard(data.columns(start, stop), mean[start:stop], scale[start:stop])
        # Right singular vectors from left ones: V = Z^T Q S^-1 (columns of this shard)
        basis[:, start:stop] = (vectors / values).T @ z
    spread = float(sums["square"]) / (n - 1)
    return Components(
        mean.float(), scale.float(), workers.total(basis), values.float(), (vectors * values).float(), spread
    )


def _standard(x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Standardised, in float64: the Gram matrix squares the range of singular values, too wide for float32 products."""
    return (x.double() - mean) / scale


def _describe(x: torch.Tensor, config: PCAConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each column in float64; the deviation of a constant column is set to 1."""
    deviation, mean = torch.std_mean(x.double(), dim=0)
    if not config.standardise:
        return mean, torch.ones_like(mean)
    return mean, torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _first_pass(
    data: Columns,
    own_shards: Sequence[tuple[int, int]],
    config: PCAConfig,
    progress: Progress,
    resume: str | Path | None,
) -> dict[str, torch.Tensor]:
    """Mean, scale, Gram matrix and sum of squares over this process's shards."""
    n, d = data.shape
    sums = _resumed(resume, n, d)
    done = sums.pop("done")
    for index, (start, stop) in enumerate(own_shards):
        if done[start]:
            continue
        x = data.columns(start, stop)
        mean, scale = _describe(x, config)
        z = _standard(x, mean, scale)
        gram = z @ z.T
        sums["gram"] += gram
        sums["square"] += gram.diagonal().sum()
        sums["mean"][start:stop], sums["scale"][start:stop] = mean, scale
        done[start:stop] = 1
        if resume is not None:
            save_artefact(resume, sums | {"done": done}, _STATE, 1, {})
        progress(index + 1, 2 * len(own_shards))
    return sums


def _resumed(path: str | Path | None, n: int, d: int) -> dict[str, torch.Tensor]:
    if path is not None and Path(path).is_file():
        sums, _ = read_artefact(path, _STATE, 1)
        if sums["gram"].shape != (n, n) or len(sums["mean"]) != d:
            shown = f"{tuple(sums['gram'].shape)[0]} models of {len(sums['mean'])} numbers"
            raise refuse("unfinished build", shown, f"{n} of {d}", f"delete {Path(path).name} and start anew")
        return sums
    return {
        "mean": torch.zeros(d, dtype=torch.float64),
        "scale": torch.zeros(d, dtype=torch.float64),
        "gram": torch.zeros(n, n, dtype=torch.float64),
        "square": torch.zeros((), dtype=torch.float64),
        "done": torch.zeros(d, dtype=torch.uint8),
    }


def top_components(gram: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values (K,) and left singular vectors (N, K) from a centred Gram matrix (N, N), whose rank is below N.

    Raises:
        VitrineError: If all models are equal.
    """
    n = len(gram)
    eigen, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    eigen, vectors = eigen.flip(0)[: n - 1], vectors.flip(1)[:, : n - 1]
    # copies of a LoRA, and layers that were never trained, leave rounding noise behind
    keep = int((eigen > 1e-11 * eigen[0].clamp_min(1e-300)).sum()) if float(eigen[0]) > 0 else 0
    if keep == 0:
        raise refuse("models", "all equal", "models that differ", "the folder holds copies of one LoRA")
    k = min(keep, count or keep)
    return eigen[:k].sqrt(), _signed(vectors[:, :k])


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    """Makes each column's largest entry positive, as the eigensolver's signs are arbitrary."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def _moments(
    data: Columns, own_shards: Sequence[tuple[int, int]], config: PCAConfig, progress: Progress
) -> dict[str, torch.Tensor]:
    n, d = data.shape
    mean, scale = torch.zeros(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    square = torch.zeros((), dtype=torch.float64)
    for index, (start, stop) in enumerate(own_shards):
        x = data.columns(start, stop)
        mean[start:stop], scale[start:stop] = _describe(x, config)
        square += (_standard(x, mean[start:stop], scale[start:stop]) ** 2).sum()
        progress(index + 1, (config.power + 3) * len(own_shards))
    return {"mean": mean, "scale": scale, "square": square}


def _randomised(
    data: Columns,
    own_shards: Sequence[tuple[int, int]],
    sums: dict,
    config: PCAConfig,
    progress: Progress,
    workers: Workers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Randomised subspace iteration on Z Z^T without forming it (Halko et al. 2011, Algorithm 4.4)."""
    n, k = data.shape[0], config.components or data.shape[0] - 1
    width = min(n, k + config.oversample)
    mean, scale = sums["mean"], sums["scale"]
    generator = torch.Generator().manual_seed(config.seed)
    q = torch.linalg.qr(torch.randn(n, width, generator=generator, dtype=torch.float64))[0]
    for turn in range(config.power + 1):
        product = torch.zeros(n, width, dtype=torch.float64)
        for index, (start, stop) in enumerate(own_shards):
            z = _standard(data.columns(start, stop), mean[start:stop], scale[start:stop])
            product += z @ (z.T @ q)
            progress((turn + 1) * len(own_shards) + index + 1, (config.power + 3) * len(own_shards))
        product = workers.total(product)
        if turn < config.power:
            q = torch.linalg.qr(product)[0]
    small = q.T @ product  # Rayleigh-Ritz: Q^T Z Z^T Q
    eigen, turned = torch.linalg.eigh((small + small.T) / 2)
    vectors = (q @ turned).flip(1)[:, :k]
    return eigen.flip(0)[:k].clamp_min(1e-12 * float(eigen[-1])).sqrt(), _signed(vectors)
