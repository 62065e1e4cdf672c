"""Adds the control embedding to the timestep embedding of diffusers models, by torch's forward hooks.

Eq. 1 (Berrada et al. 2024, 2.1) is applied with the timestep, before every adaLN or ResBlock. No weight is changed;
after the block the model is restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..diffusion.forward_clock import Forward, ForwardClock, rows_for
from ..errors import refuse
from ..families import FAMILIES, record_of
from ..families.facts import TimeEmbedding
from ..runtime.compiled import uncompiled
from .embedder import ControlEmbedder
from .gamma import GammaConfig


def time_embedding(backbone: nn.Module) -> tuple[str, TimeEmbedding]:
    """(diffusers' class of the family, where a backbone of either library embeds its timestep)."""
    record = record_of(backbone)
    if record is None or record[1].time is None:
        known = sorted(family.diffusers.kind for family in FAMILIES if family.diffusers.time is not None)
        raise refuse("model", type(backbone).__name__, known, "pass the UNet or transformer of a pipeline")
    return record[0].diffusers.kind, record[1].time


def control_width(backbone: nn.Module) -> int:
    """D: the width of the timestep embedding, which is the width of its ControlEmbedder."""
    return int(time_embedding(backbone)[1].width(uncompiled(backbone)))


class _Added(ForwardClock):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self._paths = time_embedding(backbone)[1].paths(self.backbone)
        if not self._paths:
            raise refuse("model", type(backbone).__name__, "a network of diffusers", "in ComfyUI a MODEL takes them")

    def _open(self) -> None:
        for path in self._paths:
            self._after(path, self._add)

    def _add(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + self._now.to(output)


class AddedVector(_Added):
    """A vector added to the timestep embedding while the block is open.

    Args:
        backbone: a diffusers network whose family defines its timestep embedding.
        vector: (B, D) or (1, D).
    """

    def __init__(self, backbone: nn.Module, vector: torch.Tensor) -> None:
        super().__init__(backbone)
        if vector.ndim != 2 or vector.shape[1] != control_width(backbone):
            raise refuse("vector", tuple(vector.shape), f"(B, {control_width(backbone)})", "build it for this model")
        self.vector = vector

    def _prepare(self, forward: Forward) -> torch.Tensor:
        return rows_for(self.vector, len(forward.t), "vector")


class Injection(_Added):
    """c_emb of Eq. 1 added to the timestep embedding while the block is open; gamma follows each row's timestep.

    Args:
        backbone: a diffusers network whose family defines its timestep embedding.
        embedder: of the model's width, see :func:`control_width`.
        values: (B, F) or (1, F), as :meth:`ControlSpec.rows` gives.
        drop: (B,) or (B, 2) bool, batch rows without control (the unconditional half of a guidance batch).

    Without gradients the embeddings of the values are computed at the first forward and cached: after a change of the
    embedder, open a new block.

    Example:
        >>> with Injection(unet, embedder, spec.rows(controls), GammaConfig()):
        ...     unet(x, t, text).sample
    """

    def __init__(
        self,
        backbone: nn.Module,
        embedder: ControlEmbedder,
        values: torch.Tensor,
        gamma: GammaConfig,
        drop: torch.Tensor | None = None,
    ) -> None:
        super().__init__(backbone)
        if embedder.dim != control_width(backbone):
            raise refuse("embedder width", embedder.dim, control_width(backbone), "make one for this model")
        self.embedder, self.values, self.gamma, self.drop = embedder, embedder.spec.checked(values), gamma, drop
        self._cached_terms: tuple[torch.Tensor, torch.Tensor] | None = None

    def _prepare(self, forward: Forward) -> torch.Tensor:
        high, low = self._terms(len(forward.t))
        first, *others = forward.t.tolist()
        # as samplers pass it; in half precision the weight is rounded first
        if low.dtype == torch.float32 and all(t == first for t in others):
            return self.embedder.joined(high, low, self.gamma.number(first))
        return self.embedder.joined(high, low, self.gamma.at(forward.t).to(low.device, low.dtype)[:, None])

    def _terms(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """E_h and E_l of each batch row; sampling computes them once."""
        cached = self._cached_terms
        if cached is not None and len(cached[0]) == count and not torch.is_grad_enabled():
            return cached
        drop = None if self.drop is None else rows_for(self.drop, count, "drop")
        terms = self.embedder.terms(rows_for(self.values, count, "size values"), drop)
        self._cached_terms = None if torch.is_grad_enabled() else terms
        return terms


Network = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x_t (B, C, H, W), t (B,), semantics (B, ...), c_emb (B, D)) -> prediction (B, C, H, W)."""


def injected(backbone: nn.Module, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Network:
    """A network that takes c_emb, from a diffusers backbone and ``call(x_t, t, semantics)`` that runs it."""

    def network(x: torch.Tensor, t: torch.Tensor, semantics: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        with AddedVector(backbone, added):
            return call(x, t, semantics)

    network.backbone = backbone  # type: ignore[attr-defined] # trainers check that it is not offloaded
    return network
