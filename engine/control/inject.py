"""Adding the control embedding to the timestep embedding of diffusers models, through torch's own forward hooks.

Where Eq. 1 enters (Berrada et al. 2024, 2.1): with the timestep, before every adaLN or ResBlock. No weight is touched;
after the block the model is bit for bit what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..compiled import uncompiled
from ..errors import refuse
from ..forward_clock import Forward, ForwardClock, rows_for
from .embedder import ControlEmbedder
from .gamma import GammaConfig

PLACES: dict[str, Callable[[Any], list[str]]] = {
    "UNet2DConditionModel": lambda b: ["time_embedding"],
    # The final layer reads block 0's embedding, so it is covered.
    "DiTTransformer2DModel": lambda b: [f"transformer_blocks.{i}.norm1.emb" for i in range(len(b.transformer_blocks))],
    "PixArtTransformer2DModel": lambda b: ["adaln_single.emb"],
    "SD3Transformer2DModel": lambda b: ["time_text_embed"],
}
"""diffusers class -> paths of the modules whose output is the timestep embedding."""


def family_of(backbone: nn.Module) -> str:
    """Which class of PLACES a backbone is, or derives from.

    Raises:
        VitrineError: If it is none of them.
    """
    for kind in type(uncompiled(backbone)).__mro__:
        if kind.__name__ in PLACES:
            return kind.__name__
    raise refuse("model", type(backbone).__name__, sorted(PLACES), "pass the UNet or transformer of a pipeline")


def control_width(backbone: nn.Module) -> int:
    """D: the width of the timestep embedding, which a ControlEmbedder must have."""
    model: Any = backbone
    if family_of(backbone) == "UNet2DConditionModel":
        return int(model.time_embedding.linear_2.out_features)
    return int(model.inner_dim)


class _Added(ForwardClock):
    def _open(self) -> None:
        for path in PLACES[family_of(self.backbone)](self.backbone):
            self._handles.append(self.backbone.get_submodule(path).register_forward_hook(self._add))

    def _add(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + self._now.to(output)


class AddedVector(_Added):
    """A vector added to the timestep embedding while the block is open.

    Args:
        backbone: one of PLACES.
        vector: (B, D) or (1, D).

    Raises:
        VitrineError: If the model is of another class, the vector of another width, or its rows do not match the batch.
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
        backbone: one of PLACES.
        embedder: of the model's own width, see :func:`control_width`.
        values: (B, F) or (1, F), as :meth:`ControlSpec.rows` gives.
        drop: (B,) or (B, 2) bool, rows without control (the unconditional half of a guidance batch).

    Without gradients the embeddings of the values are computed at the first forward and cached: after a change of the
    embedder, open a new block.

    Example:
        >>> with Injection(unet, embedder, spec.rows(controls), GammaConfig()):
        ...     unet(x, t, text).sample

    Raises:
        VitrineError: If the model is of another class, the embedder of another width, a value out of range, or the rows
            do not match the batch.
    """

    def __init__(
        self, backbone: nn.Module, embedder: ControlEmbedder, values: torch.Tensor, gamma: GammaConfig,
        drop: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backbone)
        if embedder.dim != control_width(backbone):
            raise refuse("embedder width", embedder.dim, control_width(backbone), "make one for this model")
        self.embedder, self.values, self.gamma, self.drop = embedder, embedder.spec.checked(values), gamma, drop
        self._cached_terms: tuple[torch.Tensor, torch.Tensor] | None = None

    def _prepare(self, forward: Forward) -> torch.Tensor:
        high, low = self._terms(len(forward.t))
        first, *others = forward.t.tolist()
        # as samplers have it; in half precision the weight is rounded first, as everywhere else
        if low.dtype == torch.float32 and all(t == first for t in others):
            return self.embedder.joined(high, low, self.gamma.number(first))
        return self.embedder.joined(high, low, self.gamma.at(forward.t).to(low.device, low.dtype)[:, None])

    def _terms(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """E_h and E_l of each row; sampling computes them once."""
        cached = self._cached_terms
        if cached is not None and len(cached[0]) == count and not torch.is_grad_enabled():
            return cached
        drop = None if self.drop is None else rows_for(self.drop, count, "drop")
        terms = self.embedder.terms(rows_for(self.values, count, "control values"), drop)
        self._cached_terms = None if torch.is_grad_enabled() else terms
        return terms


Network = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x_t (B, C, H, W), t (B,), semantics (B, ...), c_emb (B, D)) -> prediction (B, C, H, W)."""


def injected(backbone: nn.Module, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Network:
    """A network that takes c_emb, from a diffusers backbone and ``call(x_t, t, semantics)`` that runs it.

    Raises:
        VitrineError: If the model is of another class; in a call, if it is a DiT with gradient checkpointing.
    """
    # DiT embeds the timestep inside its blocks; recomputed in the backward pass, after the hooks are gone, they would
    # silently lack c_emb. The other families embed it before their blocks.
    inside = family_of(backbone) == "DiTTransformer2DModel"

    def network(x: torch.Tensor, t: torch.Tensor, semantics: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        if inside and torch.is_grad_enabled() and getattr(backbone, "is_gradient_checkpointing", False):
            raise refuse("gradient checkpointing", "on", "off for DiT", "call disable_gradient_checkpointing()")
        with AddedVector(backbone, added):
            return call(x, t, semantics)

    network.backbone = backbone  # type: ignore[attr-defined] # a trainer looks whether it is whole
    return network
