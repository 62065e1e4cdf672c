"""A space over the products B A, for LoRAs of any ranks and starts. The products themselves are never formed.

A model is mean + sum_k beta_k v_k with v_k = D^T q_k / S_k, so it is a weighted sum of the training LoRAs:
Delta W = sum_i c_i s_i B_i A_i with c = 1/N + Q (beta / S).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from ..files import check_tensors, named, parse_json, parse_table, read_artefact, save_artefact
from ..progress import Progress, silent
from .low_rank import refactor
from .manifest import Lora, LoraLayer
from .pca import top_components
from .space import DTYPES, KIND, VERSION, WeightSpace

STACK_KEYS = ("down/", "up/", "ranks/")


@dataclass(frozen=True)
class Stack:
    """One layer of all training LoRAs side by side: down (R, in), up (out, R), scales included, and ranks (N,)."""

    down: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, path: str, loras: Sequence[Lora]) -> Stack:
        """Stacks layer ``path``; a LoRA without it has rank 0 here."""
        present = [x[path] for x in loras if path in x]
        ranks = torch.tensor([x[path].rank if path in x else 0 for x in loras])
        up = torch.cat([v.up.flatten(1) * v.scale for v in present], dim=1)
        form = max((v.down.shape[1:] for v in present), key=len)  # of a 1 x 1 projection (in, 1, 1), if any has that
        return cls(torch.cat([v.down.reshape(-1, *form) for v in present]), up, ranks)

    def without(self, bad: set[int]) -> Stack:
        """The stack of the other LoRAs."""
        good = torch.tensor([i not in bad for i in range(len(self.ranks))])
        kept = good[self.owner]
        return Stack(self.down[kept], self.up[:, kept], self.ranks[good])

    @property
    def owner(self) -> torch.Tensor:
        """(R,) index of the LoRA that each of the R factors belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.ranks), device=self.ranks.device), self.ranks)

    def check(self, path: str, count: int) -> None:
        """Checks that the factors are those of ``count`` LoRAs with these ranks.

        Raises:
            VitrineError: If the shapes do not fit each other.
        """
        down, up, ranks = tuple(self.down.shape), tuple(self.up.shape), self.ranks
        sound = ranks.shape == (count,) and len(down) > 1 and 0 not in down + up and bool((ranks >= 0).all())
        if not sound or len(up) != 2 or not int(ranks.sum()) == down[0] == up[1]:
            shown = f"{path}: {down}, {up}, ranks {ranks.flatten()[:9].tolist()}"
            raise refuse("space", shown, f"(R, in), (out, R) of {count} LoRAs", "build it anew")


def read_stacks(
    ranks: Mapping[str, Sequence[int]], loras: Iterable[Lora | None], progress: Progress = silent
) -> dict[str, Stack]:
    """Stacks of LoRAs that are read one at a time; a None is left out.

    Args:
        ranks: layer path -> the rank of each LoRA there, 0 where it lacks the layer.
    """
    stacks: dict[str, Stack] = {}
    ends = {path: torch.tensor(list(column)).cumsum(0).tolist() for path, column in ranks.items()}
    count, bad = len(next(iter(ends.values()))), set[int]()
    for i, lora in enumerate(loras):
        if lora is None:
            bad.add(i)
        for path, layer in (lora or {}).items():
            if path not in stacks:
                total, tail = ends[path][-1], layer.down.shape[1:]
                blank = torch.zeros(total, *tail), torch.zeros(layer.up.shape[0], total)
                stacks[path] = Stack(*blank, torch.tensor(list(ranks[path])))
            here = slice(ends[path][i] - layer.rank, ends[path][i])
            stacks[path].down[here] = layer.down
            stacks[path].up[:, here] = (layer.up * layer.scale).flatten(1)
        progress(i + 1, count)
    return {path: stacks[path].without(bad) if bad else stacks[path] for path in sorted(stacks)}


def gram(stacks: Mapping[str, Stack], progress: Progress = silent, memory: int = 2 * 2**30) -> torch.Tensor:
    """(N, N) float64 inner products of the weight changes, in blocks that stay within ``memory`` bytes.

    G_ij = sum over layers of s_i s_j sum((B_i^T B_j) * (A_i A_j^T)): <BA, B'A'> = tr(A^T B^T B' A'). Of two blocks of
    factors only one order is computed: about R^2 (in + out) floating-point operations a layer of R factors.
    """
    n = len(next(iter(stacks.values())).ranks)
    products = torch.zeros(n, n, dtype=torch.float64)
    for index, stack in enumerate(stacks.values()):
        owner, rows = stack.owner, _block(stack, memory)
        starts = range(0, len(owner), rows)
        for first in starts:
            block, (down, up) = slice(first, first + rows), _double(stack, slice(first, first + rows))
            for second in range(first, len(owner), rows):
                other = slice(second, second + rows)
                down_other, up_other = (down, up) if second == first else _double(stack, other)
                pairs = (up.T @ up_other).mul_(down @ down_other.T)
                by_model = torch.zeros(len(pairs), n, dtype=torch.float64).index_add_(1, owner[other], pairs)
                products.index_add_(0, owner[block], by_model)
                if second > first:
                    by_model = torch.zeros(pairs.shape[1], n, dtype=torch.float64).index_add_(1, owner[block], pairs.T)
                    products.index_add_(0, owner[other], by_model)
        progress(index + 1, len(stacks))
    return products


def _double(stack: Stack, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return stack.down[block].flatten(1).double(), stack.up[:, block].double()


def _block(stack: Stack, memory: int) -> int:
    """How many factors at a time: two blocks of them, their products (twice, while multiplied) and a row a model."""
    each = 8 * (2 * (stack.down[0].numel() + len(stack.up)) + len(stack.ranks))
    # 16 x^2 + each x <= memory
    rows = int(((each * each + 64 * memory) ** 0.5 - each) / 32)
    return max(1, min(rows, 2048))


@dataclass(frozen=True)
class DeltaSpace:
    """A space in ``delta`` mode: handled as a :class:`~.space.WeightSpace`, but it has no ``decode``.

    Attributes:
        stacks: layer path -> the training LoRAs' factors.
        vectors: (N, K) left singular vectors Q of the centred products.
        singular_values: (K,) S.
        gram: (N, N) inner products of the weight changes, not centred.
        names, directions, total_variance, info: as in ``WeightSpace``.
    """

    stacks: Mapping[str, Stack]
    vectors: torch.Tensor
    singular_values: torch.Tensor
    gram: torch.Tensor
    names: tuple[str, ...] = ()
    directions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    total_variance: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    mode = "delta"

    @classmethod
    def of(
        cls, loras: Sequence[Lora], names: Sequence[str] = (), components: int | None = None,
        progress: Progress = silent, info: Mapping[str, Any] | None = None,
    ) -> DeltaSpace:  # fmt: skip
        """PCA of the products of LoRAs of any ranks.

        Raises:
            VitrineError: If more than N - 1 components are asked for, or all LoRAs are equal.
        """
        stacks = {path: Stack.of(path, loras) for path in sorted({p for x in loras for p in x})}
        return cls.of_stacks(stacks, names, components, progress, info)

    @classmethod
    def of_stacks(
        cls, stacks: Mapping[str, Stack], names: Sequence[str] = (), components: int | None = None,
        progress: Progress = silent, info: Mapping[str, Any] | None = None, memory: int = 2 * 2**30,
    ) -> DeltaSpace:  # fmt: skip
        """:meth:`of`, from LoRAs that stand side by side already; ``memory`` bytes beside these, see :func:`gram`."""
        n = len(next(iter(stacks.values())).ranks)
        if components is not None and not 0 < components < n:
            raise refuse("components", components, f"1 .. {n - 1} for {n} models", "leave it out for all")
        products = gram(stacks, progress, memory)
        centred = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()  # H G H
        values, vectors = top_components(centred, components)
        variance = float(centred.diagonal().sum()) / (n - 1)
        return cls(stacks, vectors.float(), values.float(), products, tuple(names), {}, variance, dict(info or {}))

    @property
    def dimension(self) -> int:
        """K."""
        return len(self.singular_values)

    @property
    def count(self) -> int:
        """N."""
        return len(self.vectors)

    @property
    def coefficients(self) -> torch.Tensor:
        """(N, K) of the training models, Q S."""
        return self.vectors * self.singular_values

    @property
    def deviations(self) -> torch.Tensor:
        """(K,) standard deviation of each coefficient over the training models."""
        return self.singular_values / (self.count - 1) ** 0.5

    @property
    def explained(self) -> torch.Tensor:
        """(K,) share of the total variance each component holds."""
        return (self.deviations.double() ** 2 / self.total_variance).float()

    @property
    def identity(self) -> str:
        """A short hash of what coefficients mean in this space."""
        digest = hashlib.sha256(json.dumps([list(self.stacks), list(self.names)]).encode())
        digest.update(self.singular_values.float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def weights(self, coefficients: torch.Tensor) -> torch.Tensor:
        """(..., k) -> (..., N), the share of each training LoRA in the model; differentiable.

        Raises:
            VitrineError: If there are more coefficients than components.
        """
        k = coefficients.shape[-1]
        if not 0 < k <= self.dimension:
            raise refuse("coefficients", k, f"1 .. {self.dimension}", "use the space they were made in")
        q = self.vectors[:, :k].to(coefficients.device)
        s = self.singular_values[:k].to(coefficients.device)
        # c = 1 / N + Q (beta / S)
        return 1 / self.count + (coefficients.float() / s) @ q.T

    def stacked(self, coefficients: torch.Tensor) -> dict[str, LoraLayer]:
        """(k,) -> the exact LoRA, of rank R = sum of all ranks in each layer; differentiable."""
        c = self.weights(coefficients)
        return {
            path: LoraLayer(stack.down.to(c.device), stack.up.to(c.device) * c[stack.owner.to(c.device)],
                            float(len(stack.down)))
            for path, stack in self.stacks.items()
        }  # fmt: skip

    def lora(self, coefficients: torch.Tensor, rank: int | None = None) -> dict[str, LoraLayer]:
        """(k,) -> the LoRA of that model, re-factored to ``rank`` (None: exactly, see :func:`~.low_rank.refactor`)."""
        return {path: refactor(layer, rank) for path, layer in self.stacked(coefficients).items()}

    def encode_lora(self, lora: Lora) -> torch.Tensor:
        """A LoRA of any rank -> (K,): the nearest point of the space. Layers unknown to the space are ignored."""
        cross = torch.zeros(self.count, dtype=torch.float64)
        for path, stack in self.stacks.items():
            if path in lora:
                other = lora[path]
                up = (stack.up.double().T @ other.up.flatten(1).double()) * other.scale
                products = (up * (stack.down.flatten(1).double() @ other.down.flatten(1).double().T)).sum(1)
                cross.index_add_(0, stack.owner, products)
        centred = cross - self.gram.mean(1)
        return ((centred - centred.mean()) @ self.vectors.double() / self.singular_values).float()

    def first(self, count: int) -> DeltaSpace:
        """The space of the first ``count`` components."""
        return self if count >= self.dimension else replace(
            self, vectors=self.vectors[:, :count], singular_values=self.singular_values[:count],
            directions={label: d[:count] for label, d in self.directions.items()},
        )  # fmt: skip

    def save(self, path: str | Path, dtype: str = "float32") -> Path:
        """Writes one safetensors file, whole or not at all; ``dtype`` is that of the LoRAs' factors.

        Raises:
            VitrineError: If the dtype is unknown.
        """
        if dtype not in DTYPES:
            raise refuse("dtype", dtype, sorted(DTYPES), "float16 halves the file")
        narrow = DTYPES[dtype]
        tensors = {"Q": self.vectors.float(), "S": self.singular_values.float(), "G": self.gram}
        for name, stack in self.stacks.items():
            tensors |= {f"down/{name}": stack.down.to(narrow), f"up/{name}": stack.up.to(narrow)}
            tensors[f"ranks/{name}"] = stack.ranks.to(torch.int32)
        tensors |= {f"dir.{label}": d.float() for label, d in self.directions.items()}
        header = {"mode": self.mode, "names": json.dumps(list(self.names)), "info": json.dumps(dict(self.info))}
        header |= {"identity": self.identity, "total_variance": repr(self.total_variance)}
        return save_artefact(path, tensors, KIND, VERSION, header)

    @classmethod
    def load(cls, path: str | Path) -> DeltaSpace:
        """Reads what :meth:`save` wrote.

        Raises:
            VitrineError: If the file is missing, truncated, not a space, of a later version, or holds NaN or infinity.
        """
        tensors, header = read_artefact(path, KIND, VERSION)
        with named(path, "space", "a header that fits its tensors", "build it anew"):
            return cls._rebuilt(tensors, header)

    @classmethod
    def _rebuilt(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> DeltaSpace:
        check_tensors({k: v for k, v in tensors.items() if not k.startswith("ranks/")})
        if header.get("mode") != cls.mode:
            raise refuse("space", f"mode {header.get('mode')!r}", cls.mode, "load it with load_space")
        paths, *others = ({k.split("/", 1)[1] for k in tensors if k.startswith(prefix)} for prefix in STACK_KEYS)
        if not paths or any(other != paths for other in others):
            raise ValueError(f"down, up and ranks of {len(paths)}, {', '.join(str(len(o)) for o in others)} layers")
        stacks = {
            p: Stack(tensors[f"down/{p}"].float(), tensors[f"up/{p}"].float(), tensors[f"ranks/{p}"].long())
            for p in sorted(paths)
        }
        directions = {k[4:]: v.float() for k, v in tensors.items() if k.startswith("dir.")}
        vectors, singular, products = tensors["Q"].float(), tensors["S"].float(), tensors["G"].double()
        for path, stack in stacks.items():
            stack.check(path, len(vectors))
        if vectors.ndim != 2 or singular.shape != vectors.shape[1:] or products.shape != 2 * vectors.shape[:1]:
            raise ValueError(f"Q {tuple(vectors.shape)}, S {tuple(singular.shape)}, G {tuple(products.shape)}")
        names, variance = tuple(parse_json(header["names"])), float(header["total_variance"])
        return cls(stacks, vectors, singular, products, names, directions, variance, parse_table(header["info"]))


Space = WeightSpace | DeltaSpace
"""A space of either mode."""


def member_names(space: Space) -> tuple[str, ...]:
    """Names of the training models whose coefficients the space holds: as it says, else ``0``, ``1``, ...

    Published spaces have none of their own, see :func:`~.official.import_official`.
    """
    return space.names or tuple(map(str, range(len(space.coefficients))))
