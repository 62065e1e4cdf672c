"""Stacked factors of many LoRAs, layer by layer, for delta spaces, and inner products of all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...errors import refuse
from ...io.lora_layer import Lora, LoraLayer
from ...runtime.progress import Progress, silent
from ..loras.layer_names import layer_fits
from .build_state import BuildState

TOGETHER = 4096
"""Most factors of a layer that are kept as factors; for more, their sum is formed."""
PRODUCTS = "products of LoRAs"
"""The job of a :class:`~.build_state.BuildState` of :func:`gram`."""
TILE = 2**28
"""Most bytes of formed updates at a time, so that they stay in the CPU cache."""


@dataclass(frozen=True)
class Stack:
    """One layer of all training LoRAs, stacked: down (R, in), up (out, R), scales included, and ranks (N,)."""

    down: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, path: str, loras: Sequence[Lora]) -> Stack:
        """Stacks layer ``path``; a LoRA without it has rank 0."""
        present = [x[path] for x in loras if path in x]
        ranks = torch.tensor([x[path].rank if path in x else 0 for x in loras])
        up = torch.cat([v.up.flatten(1) * v.scale for v in present], dim=1)
        form = max((v.down.shape[1:] for v in present), key=len)  # (in, 1, 1) of a 1 x 1 projection, if any
        return cls(torch.cat([v.down.reshape(-1, *form) for v in present]), up, ranks)

    def without(self, bad: set[int]) -> Stack:
        """The stack without the given LoRAs."""
        good = torch.tensor([i not in bad for i in range(len(self.ranks))])
        kept = good[self.owner]
        return Stack(self.down[kept], self.up[:, kept], self.ranks[good])

    @property
    def owner(self) -> torch.Tensor:
        """(R,) index of each factor's LoRA."""
        return torch.repeat_interleave(torch.arange(len(self.ranks), device=self.ranks.device), self.ranks)

    @property
    def outer(self) -> tuple[int, int]:
        """(out, in), for a convolution (out, in k k)."""
        return len(self.up), self.down[:1].numel()

    def mixed(self, weights: torch.Tensor) -> LoraLayer:
        """sum_i c_i B_i A_i for (N,) weights c, as one layer of rank R; differentiable."""
        up = self.up.to(weights.device) * weights[self.owner.to(weights.device)]
        return LoraLayer(self.down.to(weights.device), up, float(len(self.down)))

    def total(self, of_models: torch.Tensor) -> torch.Tensor:
        """The sum as a matrix, (out, in) float64; products of some factors at a time in float32."""
        change, weights = torch.zeros(self.outer, dtype=torch.float64), of_models.float()[self.owner]
        for first in range(0, len(self.down), TOGETHER):
            block = slice(first, first + TOGETHER)
            change += (self.up[:, block] * weights[block]) @ self.down[block].flatten(1)
        return change

    def check(self, path: str, count: int) -> None:
        """Checks that the factors are those of ``count`` LoRAs with these ranks."""
        down, up, ranks = tuple(self.down.shape), tuple(self.up.shape), self.ranks
        sound = ranks.shape == (count,) and len(down) > 1 and 0 not in down + up and bool((ranks >= 0).all())
        sound = sound and len(up) == 2 and layer_fits(path, up[0] * math.prod(down[1:]))
        if not sound or len(up) != 2 or not int(ranks.sum()) == down[0] == up[1]:
            shown = f"{path}: {down}, {up}, ranks {ranks.flatten()[:9].tolist()}"
            raise refuse("space", shown, f"(R, in), (out, R) of {count} LoRAs", "build it again")


def read_stacks(
    ranks: Mapping[str, Sequence[int]], loras: Iterable[Lora | None], progress: Progress = silent
) -> dict[str, Stack]:
    """Stacks of LoRAs that are read one at a time; None is skipped.

    Args:
        ranks: layer path -> the rank of each LoRA, 0 if it lacks the layer.
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


def gram(
    stacks: Mapping[str, Stack], progress: Progress = silent, memory: int = 2 * 2**30, state: BuildState | None = None
) -> torch.Tensor:
    """(N, N) float64 inner products of the weight updates, within ``memory`` bytes in addition to one layer's factors.

    G_ij = sum over layers of s_i s_j sum((B_i^T B_j) * (A_i A_j^T)): <BA, B'A'> = tr(A^T B^T B' A'). A layer of R
    factors takes R^2 (in + out) / 2 multiplications this way; forming N updates, some rows at a time, takes about
    N^2 in out / 2 + R in out. The cheaper way is used.

    Args:
        state: stores the sums, from which a killed run resumes.
    """
    n = len(next(iter(stacks.values())).ranks)
    state = state or BuildState(None, PRODUCTS, {})
    sums = state.tensors or state.begin(len(stacks), {"gram": torch.zeros(n, n, dtype=torch.float64)})
    with state.kept():
        for index, path in enumerate(stacks):
            if not sums["done"][index]:
                stack = stacks[path]
                paired, formed = multiplications(n, len(stack.down), *stack.outer)
                state.enter()
                sums["gram"] += (_formed if formed < paired else _paired)(stack, memory)
                state.finish(index, index + 1)
                progress(index + 1, len(stacks))
    return sums["gram"]


def multiplications(models: int, factors: int, out: int, width: int) -> tuple[float, float]:
    """Multiplications for the products of all pairs in a layer: by pairs of factors, and with formed updates."""
    formed = models**2 * out * width * 9 / 16 + factors * out * width  # each of eight blocks with those after it
    return factors**2 * (out + width) / 2, formed


def _paired(stack: Stack, memory: int) -> torch.Tensor:
    """Inner products by pairs of blocks of factors, each pair once."""
    n, owner, rows = len(stack.ranks), stack.owner, _block(stack, memory)
    products = torch.zeros(n, n, dtype=torch.float64)
    for first in range(0, len(owner), rows):
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
    return products


def _formed(stack: Stack, memory: int) -> torch.Tensor:
    """Inner products from some rows of all updates at a time; each pair of blocks once."""
    n, (out, width) = len(stack.ranks), stack.outer
    rows = max(1, min(out, min(memory, TILE) // (8 * width * (n + 2))))
    ends = stack.ranks.cumsum(0).tolist()
    products, side = torch.zeros(n, n, dtype=torch.float64), max(64, -(-n // 8))
    space = torch.empty(n, rows * width, dtype=torch.float64)  # allocated once, since a second would double the memory
    for first in range(0, out, rows):
        changes = space[:, : min(rows, out - first) * width]
        for i, (end, rank) in enumerate(zip(ends, stack.ranks.tolist(), strict=True)):
            own = slice(end - rank, end)
            up, down = stack.up[first : first + rows, own].double(), stack.down[own].flatten(1).double()
            torch.mm(up, down, out=changes[i].view(-1, width))
        for start in range(0, n, side):
            products[start : start + side, start:] += changes[start : start + side] @ changes[start:].T
    upper = products.triu()
    return upper + upper.triu(1).T


def _double(stack: Stack, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return stack.down[block].flatten(1).double(), stack.up[:, block].double()


def _block(stack: Stack, memory: int) -> int:
    """Factors per block: two blocks, their products (twice during multiplication) and a row per model."""
    each = 8 * (2 * (stack.down[0].numel() + len(stack.up)) + len(stack.ranks))
    # 16 x^2 + each x <= memory
    rows = int(((each * each + 64 * memory) ** 0.5 - each) / 32)
    return max(1, min(rows, 2048))
