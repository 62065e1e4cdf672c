"""A space over the products B A, for LoRAs of any rank and initialisation. The products are never formed.

A model is mean + sum_k beta_k v_k with v_k = D^T q_k / S_k, so it is a weighted sum of the training LoRAs:
Delta W = sum_i c_i s_i B_i A_i with c = 1/N + Q (beta / S).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import refuse
from ...io.files import check_tensors, named, parse_json, parse_table, read_artefact, save_artefact
from ...io.hub import Shared
from ...io.lora_layer import Lora, LoraLayer
from ...io.number_checks import LARGEST_RANK, integers
from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from ..loras.low_rank import factored, refactor
from .build_state import BuildState
from .factor_stacks import TOGETHER, Stack, gram
from .linked_factors import LinkedStacks
from .principal_components import top_components
from .space import DTYPES, KIND, LINKED_VERSION, VERSION, WeightSpace
from .space_checks import (
    LARGEST,
    check_components,
    check_directions,
    check_info,
    check_names,
    check_numbers,
    check_spread,
)

STACK_KEYS = ("down/", "up/", "ranks/")


@one_line
@dataclass(frozen=True)
class DeltaSpace(Shared):
    """A space in ``delta`` mode: with the interface of :class:`~.space.WeightSpace`, except ``decode``.

    Attributes:
        stacks: layer path -> the training LoRAs' factors.
        vectors: (N, K) left singular vectors Q of the centred products.
        singular_values: (K,) S.
        gram: (N, N) inner products of the weight updates, not centred.
        names, directions, total_variance, info: as in ``WeightSpace``.
    """

    FILE = "space.w2w.safetensors"
    TITLE = "Weight space of LoRAs"
    ABOUT = "Directions of many LoRAs of one base model (weights2weights, arXiv:2406.09413)."
    FOLDER = "vitrine_w2w"

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
        cls,
        loras: Sequence[Lora],
        names: Sequence[str] = (),
        components: int | None = None,
        progress: Progress = silent,
        info: Mapping[str, Any] | None = None,
    ) -> DeltaSpace:
        """PCA of the products of LoRAs of any ranks."""
        stacks = {path: Stack.of(path, loras) for path in sorted({p for x in loras for p in x})}
        return cls.of_stacks(stacks, names, components, progress, info)

    @classmethod
    def of_stacks(
        cls,
        stacks: Mapping[str, Stack],
        names: Sequence[str] = (),
        components: int | None = None,
        progress: Progress = silent,
        info: Mapping[str, Any] | None = None,
        memory: int = 2 * 2**30,
        state: BuildState | None = None,
    ) -> DeltaSpace:
        """:meth:`of`, from stacked factors; ``memory`` and ``state`` as in :func:`gram`."""
        n = len(stacks.files) if isinstance(stacks, LinkedStacks) else len(next(iter(stacks.values())).ranks)
        if components is not None and not 0 < components < n:
            raise refuse("components", components, f"1 .. {n - 1} for {n} models", "leave it out for all")
        products = gram(stacks, progress, memory, state)
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
        """(K,) fraction of the total variance of each component."""
        return (self.deviations.double() ** 2 / self.total_variance).float()

    @property
    def inputs(self) -> list[object]:
        """Inputs of its models for a :class:`~vitrine.engine.jobs.run.Run`: all but names and directions."""
        return [self.stacks, self.vectors, self.singular_values, self.gram]

    @property
    def identity(self) -> str:
        """A short hash of everything that gives coefficients their meaning."""
        digest = hashlib.sha256(json.dumps([list(self.stacks), list(self.names)]).encode())
        digest.update(self.singular_values.float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def weights(self, coefficients: torch.Tensor) -> torch.Tensor:
        """(..., k) -> (..., N), the weight of each training LoRA in the model; differentiable."""
        k = coefficients.shape[-1]
        if not 0 < k <= self.dimension:
            raise refuse("coefficients", k, f"1 .. {self.dimension}", "use the space that they belong to")
        q = self.vectors[:, :k].to(coefficients.device)
        s = self.singular_values[:k].to(coefficients.device)
        # c = 1 / N + Q (beta / S)
        return 1 / self.count + (coefficients.float() / s) @ q.T

    def stacked(self, coefficients: torch.Tensor) -> dict[str, LoraLayer]:
        """(k,) -> the exact LoRA, of rank R = sum of all ranks in each layer; differentiable."""
        c = self.weights(coefficients)
        return {path: stack.mixed(c) for path, stack in self.stacks.items()}

    def lora(self, coefficients: torch.Tensor, rank: int | None = None) -> dict[str, LoraLayer]:
        """(k,) -> the LoRA of that model, re-factored to ``rank``.

        None is exact, see :func:`~..loras.low_rank.refactor`.
        """
        c, out = self.weights(coefficients), {}
        for path, stack in self.stacks.items():
            few = len(stack.down) <= TOGETHER
            tail = stack.down.shape[1:]
            out[path] = refactor(stack.mixed(c), rank) if few else factored(stack.total(c), tail, rank)
        return out

    def encode_lora(self, lora: Lora) -> torch.Tensor:
        """A LoRA of any rank -> (K,): the nearest point of the space. Unknown layers are ignored."""
        return self.encode_products(self.products_with(lora))

    def encode_products(self, products: torch.Tensor) -> torch.Tensor:
        """(N,) inner products of a LoRA's update with the training LoRAs' -> (K,), as :meth:`encode_lora`."""
        centred = products - self.gram.mean(1)
        return ((centred - centred.mean()) @ self.vectors.double() / self.singular_values).float()

    def products_with(self, lora: Lora) -> torch.Tensor:
        """(N,) float64 inner products of a LoRA's weight update with each training LoRA's."""
        cross = torch.zeros(self.count, dtype=torch.float64)
        for path in self.stacks:
            if path in lora:
                stack, other = self.stacks[path], lora[path]
                up = (stack.up.double().T @ other.up.flatten(1).double()) * other.scale
                products = (up * (stack.down.flatten(1).double() @ other.down.flatten(1).double().T)).sum(1)
                cross.index_add_(0, stack.owner, products)
        return cross

    def first(self, count: int) -> DeltaSpace:
        """The space of the first ``count`` components."""
        check_components(count)
        return (
            self
            if count >= self.dimension
            else replace(
                self,
                vectors=self.vectors[:, :count],
                singular_values=self.singular_values[:count],
                directions={label: d[:count] for label, d in self.directions.items()},
            )
        )

    def _saved(self, folder: Path, source: str) -> Path:
        if isinstance(self.stacks, LinkedStacks):
            raise refuse(
                "space", "one that is linked to its LoRA files", "one with its factors", "build it without linked"
            )
        return super()._saved(folder, source)

    def save(self, path: str | Path, dtype: str = "float32") -> Path:
        """Writes one safetensors file atomically; ``dtype`` is that of the LoRAs' factors.

        A linked space (see :class:`~.linked_factors.LinkedStacks`) stores the paths of its LoRA files, not
        factors.
        """
        if dtype not in DTYPES:
            raise refuse("dtype", dtype, sorted(DTYPES), "float16 halves the file")
        narrow = DTYPES[dtype]
        tensors = {"Q": self.vectors.float(), "S": self.singular_values.float(), "G": self.gram}
        linked = isinstance(self.stacks, LinkedStacks)
        for name, stack in () if linked else self.stacks.items():
            tensors |= {f"down/{name}": stack.down.to(narrow), f"up/{name}": stack.up.to(narrow)}
            tensors[f"ranks/{name}"] = stack.ranks.to(torch.int32)
        tensors |= {f"dir.{label}": d.float() for label, d in self.directions.items()}
        header = {"mode": self.mode, "names": json.dumps(list(self.names)), "info": json.dumps(dict(self.info))}
        header |= {"identity": self.identity, "total_variance": repr(self.total_variance)}
        if isinstance(self.stacks, LinkedStacks):
            header["linked"] = json.dumps(self.stacks.header(Path(path)))
            self.stacks.check_header(parse_table(header["linked"]), Path(path))
        version = LINKED_VERSION if linked else VERSION
        return save_artefact(path, tensors, KIND, version, header, self._checked)

    @classmethod
    def load(cls, path: str | Path, folders: Sequence[str | Path] = ()) -> DeltaSpace:
        """Reads a file of :meth:`save`.

        Args:
            folders: further folders with a linked space's LoRAs, see :func:`~..building.build_space.load_space`.
        """
        tensors, header = read_artefact(path, KIND, LINKED_VERSION)
        with named(path, "space", "a header that fits its tensors", "build it again"):
            space = cls._checked(tensors, header)
            if "linked" not in header:
                stacks = {p: Stack(s.down.float(), s.up.float(), s.ranks) for p, s in space.stacks.items()}
                return replace(space, stacks=stacks)
            linked = LinkedStacks.of_header(parse_table(header["linked"]), Path(path), folders)
            if len(linked.files) != space.count:
                raise ValueError(f"{len(linked.files)} files of {space.count} models")
            return replace(space, stacks=linked)

    @classmethod
    def _checked(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> DeltaSpace:
        """The space of a file, without the factors of a linked one."""
        check_tensors({k: v for k, v in tensors.items() if not k.startswith("ranks/")})
        check_numbers({k: v for k, v in tensors.items() if not k.startswith("ranks/") and k != "G"})
        check_numbers({"G": tensors["G"]}, LARGEST * LARGEST)
        if header.get("mode") != cls.mode:
            raise refuse("space", f"mode {header.get('mode')!r}", cls.mode, "load it with load_space")
        directions = {k[4:]: v.float() for k, v in tensors.items() if k.startswith("dir.")}
        vectors, singular, products = tensors["Q"].float(), tensors["S"].float(), tensors["G"].double()
        stacks = {} if "linked" in header else _stacks_in(tensors, len(vectors))
        if vectors.ndim != 2 or singular.shape != vectors.shape[1:] or products.shape != 2 * vectors.shape[:1]:
            raise ValueError(f"Q {tuple(vectors.shape)}, S {tuple(singular.shape)}, G {tuple(products.shape)}")
        names, variance = check_names(parse_json(header["names"]), len(vectors)), float(header["total_variance"])
        info = parse_table(header["info"])
        check_spread(singular, variance, len(vectors))
        check_directions(directions, singular)
        check_info(info, len(singular), len(vectors))
        if not variance > 0 or not bool((singular > 0).all()):
            raise ValueError(f"total variance {variance}, singular values from {float(singular.min())}")
        return cls(stacks, vectors, singular, products, names, directions, variance, info)


def _stacks_in(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, Stack]:
    """The factors of ``count`` models in a space file."""
    paths, *others = ({k.split("/", 1)[1] for k in tensors if k.startswith(prefix)} for prefix in STACK_KEYS)
    if not paths or any(other != paths for other in others):
        raise ValueError(f"down, up and ranks of {len(paths)}, {', '.join(str(len(o)) for o in others)} layers")
    stacks = {}
    for path in sorted(paths):
        ranks = integers(tensors[f"ranks/{path}"], f"ranks of {path}", torch.int32, 0, LARGEST_RANK)
        stacks[path] = Stack(tensors[f"down/{path}"], tensors[f"up/{path}"], ranks)
        stacks[path].check(path, count)
    return stacks


Space = WeightSpace | DeltaSpace
"""A space of either mode."""


def member_names(space: Space) -> tuple[str, ...]:
    """Names of the training models whose coefficients the space has; ``0``, ``1``, ... without names.

    Published spaces have no names, see :func:`~.official_files.import_official`.
    """
    return space.names or tuple(map(str, range(len(space.coefficients))))
