"""Principal components of many flat weight vectors, by column shards, in bounded memory, resumable.

The Gram route reads the data twice: once for mean, deviation and G = sum of Z_l Z_l^T over shards l, once for
V_l = Z_l^T Q / S. The randomised route never forms G and reads the data once per power iteration, once before and
once after them.
Shards depend on each other only through that sum, so they may be computed in any process and order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import refuse
from ...io.number_checks import integer
from ...io.table_on_disk import RowFile
from ...runtime.processes import ALONE, Workers
from ...runtime.progress import Progress, silent
from ...settings.w2w_options import PCAConfig
from .build_state import BuildState
from .manifest import Manifest
from .space import WeightSpace

_SUMMED = 2**22
"""Numbers that are summed over processes at once, to avoid a full copy."""


@dataclass(frozen=True)
class Matrix:
    """N models of D numbers each, in memory or in a table on disk, read by columns.

    Attributes:
        data: (N', D).
        rows: (N,) the indices used; None uses all.
    """

    data: torch.Tensor | RowFile
    rows: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        return self.data.shape[0] if self.rows is None else len(self.rows), self.data.shape[1]

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """(N, stop - start) float32."""
        shard = self.data.columns(start, stop) if isinstance(self.data, RowFile) else self.data[:, start:stop]
        return shard.float() if self.rows is None else shard[self.rows].float()

    def shards(self, memory: int) -> list[tuple[int, int]]:
        """The column ranges to read: the blocks in which a table was written, or as many columns as fit."""
        return list(self.data.blocks()) if isinstance(self.data, RowFile) else shards(*self.shape, memory)


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
    data: Matrix,
    config: PCAConfig | None = None,
    progress: Progress = silent,
    *,
    resume: str | Path | None = None,
    workers: Workers = ALONE,
    inputs: Mapping[str, object] | None = None,
) -> Components:
    """PCA of the (standardised) rows.

    Args:
        resume: a file with the sums so far, from which an interrupted or killed run resumes.
        workers: processes that divide the shards; all return the same.
        inputs: inputs of the rows, for a :class:`~vitrine.engine.jobs.run.Run`; None: the rows
            themselves.
    """
    config = config or PCAConfig()
    n, d = data.shape
    if n < 2:
        raise refuse("models", n, "two or more", "a space needs several LoRAs")
    if config.components is not None and config.components > n - 1:
        raise refuse("components", config.components, f"up to {n - 1} for {n} models", "leave it out for all")
    ranges, gram = data.shards(config.memory), _gram_route(n, config)
    own = [r for i, r in enumerate(ranges) if i % workers.count == workers.index]
    facts = {k: v for k, v in config.to_dict().items() if k != "memory"} | {"route": "gram" if gram else "randomised"}
    identity = {"settings": facts | {"shard": ranges[0][1]}, "processes": [workers.index, workers.count]}
    state = BuildState(resume, "principal components", {**(inputs or {"rows": data}), **identity})
    if gram:  # exact: eigenvectors of G = sum of Z_l Z_l^T over the shards l
        sums = state.tensors or state.begin(d, _moments(d) | {"gram": torch.zeros(n, n, dtype=torch.float64)})
        with state.kept():
            for index, (start, stop) in enumerate(own):
                if not sums["done"][start]:
                    z = _entering(state, data, start, stop, config)
                    sums["gram"].addmm_(z, z.T)
                    state.finish(start, stop)
                progress(index + 1, len(own))
        products = workers.total(sums.pop("gram"))
        square = float(products.diagonal().sum())
        factors = _Leading(*top_components(products, config.components), square)
        del products
    else:
        factors = _randomised(data, own, config, progress, state, workers)
    mean, scale = (workers.total(state.tensors[name]) for name in ("mean", "scale"))
    state.tensors.clear()
    basis, left = torch.zeros(len(factors.values), d), (factors.vectors / factors.values).T
    for index, (start, stop) in enumerate(own):
        # Right singular vectors from left ones: V = Z^T Q S^-1 (columns of this shard)
        basis[:, start:stop] = left @ _standard(data.columns(start, stop), config)[0]
        progress(index + 1, len(own))
    del left
    for part in basis.split(max(1, _SUMMED // d)):
        part.copy_(workers.total(part))
    coefficients = (factors.vectors * factors.values).float()
    return Components(mean, scale, basis, factors.values.float(), coefficients, factors.square / (n - 1))


def _gram_route(n: int, config: PCAConfig) -> bool:
    """Whether the exact route is taken."""
    # the Gram matrix, its eigenvectors, the eigensolver's workspace; or four matrices of the subspace's width
    exact, width = 40 * n * n, min(n, (config.components or n) + config.oversample)
    needed = exact if config.route == "gram" or config.components is None else 32 * n * width
    if config.route != "randomised" and exact <= config.memory:
        return True
    if needed > config.memory:
        shown = f"{config.memory / 2**20:.0f} MiB for {config.components or 'all'} components of {n} models"
        raise refuse("memory", shown, f"{needed / 2**20:.0f} MiB", "allow more memory, or fewer components")
    return config.route == "gram" or config.components is None


class _Leading(NamedTuple):
    """Singular values (K,), left singular vectors (N, K), and the sum of squares of all numbers."""

    values: torch.Tensor
    vectors: torch.Tensor
    square: float


def _standard(x: torch.Tensor, config: PCAConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standardised columns with their means and deviations, in float64; a constant column's deviation is set to 1.

    Float64, because the Gram matrix squares the range of singular values, which is too wide for float32.
    """
    z = x.double()
    deviation, mean = torch.std_mean(z, dim=0)
    scale = torch.where(deviation > 0, deviation, 1.0) if config.standardise else torch.ones_like(mean)
    return z.sub_(mean).div_(scale), mean, scale


def _randomised(
    data: Matrix,
    own: Sequence[tuple[int, int]],
    config: PCAConfig,
    progress: Progress,
    state: BuildState,
    workers: Workers,
) -> _Leading:
    """Randomised subspace iteration on Z Z^T without forming it (Halko et al. 2011, Algorithm 4.4)."""
    (n, d), k = data.shape, config.components or data.shape[0] - 1
    width = min(n, k + config.oversample)
    sums = state.tensors or state.begin(d, _moments(d) | _start(n, width, config.seed))
    first_turn = integer(int(sums["turn"]), "turn", 0, config.power + 1)
    if len(set(workers.gather(first_turn))) > 1:  # killed while only some had started the next pass
        raise refuse("unfinished build", "processes at different steps", "one step", "empty the work folder")
    for turn in range(first_turn, config.power + 1):
        with state.kept():
            for index, (start, stop) in enumerate(own):
                if not sums["done"][start]:
                    z = _entering(state, data, start, stop, config)
                    if not turn:
                        sums["square"] += torch.linalg.vector_norm(z) ** 2
                    sums["product"].addmm_(z, z.T @ sums["q"])
                    state.finish(start, stop)
                progress(turn * len(own) + index + 1, (config.power + 1) * len(own))
        product = workers.total(sums["product"])
        if turn < config.power:
            sums["q"] = sums["product"] = torch.zeros(0)  # frees memory for the next basis
            sums["q"] = torch.linalg.qr(product)[0]
            sums["product"] = product.zero_()
            state.next_turn()
            workers.meet()
    q, square = sums.pop("q"), float(workers.total(sums["square"]))
    sums.pop("product")
    small = q.T @ product  # Rayleigh-Ritz: Q^T Z Z^T Q
    del product
    eigen, turned = torch.linalg.eigh((small + small.T) / 2)
    vectors = q @ turned.flip(1)[:, :k]
    values = eigen.flip(0)[:k].clamp_min(1e-12 * float(eigen[-1])).sqrt()
    return _Leading(values, _signed(vectors), square)


def _moments(d: int) -> dict[str, torch.Tensor]:
    """Means and deviations of columns that have not been read."""
    return {"mean": torch.zeros(d), "scale": torch.zeros(d)}


def _entering(state: BuildState, data: Matrix, start: int, stop: int, config: PCAConfig) -> torch.Tensor:
    """Standardised columns that the sums are about to include; stores their means and deviations."""
    z, mean, scale = _standard(data.columns(start, stop), config)
    state.enter()
    state.tensors["mean"][start:stop], state.tensors["scale"][start:stop] = mean, scale
    return z


def _start(n: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """A random basis, and zero sums."""
    random = torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zeros = {"square": torch.zeros((), dtype=torch.float64), "turn": torch.zeros((), dtype=torch.long)}
    return zeros | {"q": torch.linalg.qr(random)[0], "product": torch.zeros(n, width, dtype=torch.float64)}


def top_components(gram: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values (K,) and left singular vectors (N, K) of a centred Gram matrix (N, N), whose rank is below N."""
    n = len(gram)
    eigen, vectors = torch.linalg.eigh((gram + gram.T).div_(2))
    eigen = eigen.flip(0)[: n - 1]
    # copies of a LoRA, and layers that were never trained, leave rounding noise
    keep = int((eigen > 1e-11 * eigen[0].clamp_min(1e-300)).sum()) if float(eigen[0]) > 0 else 0
    if keep == 0:
        raise refuse("models", "all equal", "models that differ", "the folder contains copies of one LoRA")
    k = min(keep, count or keep)
    return eigen[:k].sqrt(), _signed(vectors[:, n - k :].flip(1))


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    """Makes each column's largest entry positive, in place, since the eigensolver's signs are arbitrary."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors.mul_(torch.where(largest < 0, -1.0, 1.0))
