"""Editing a model: sliders along directions, what changes as a small LoRA of its own, and edits that begin late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..config import Config
from ..errors import refuse
from .delta import DeltaSpace
from .directions import MODES, Space, named, without
from .manifest import Lora, LoraLayer


@dataclass(frozen=True)
class EditConfig(Config):
    """How sliders are read.

    Attributes:
        protect: labels whose scores an edit must leave alone.
        mode: of protecting, ``joint`` or ``official_sequential``.
        start: the edit is in force while the network's timestep is at most this (weights2weights, appendix I): 1000 is
            the whole run, 700 keeps the layout, below 0 never.
        blocks: prefixes of layer paths the edit may change, e.g. ``up_blocks``; empty means all.
    """

    protect: tuple[str, ...] = ()
    mode: str = "joint"
    start: float = 1000.0
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "protect", tuple(self.protect))
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.mode not in MODES:
            raise refuse("mode", self.mode, MODES, "joint clears all protected directions")
        if not -1 <= self.start <= 1000:
            raise refuse("start", self.start, "-1 .. 1000", "1000 edits the whole run")


def shift(space: Space, strengths: Mapping[str, float], config: EditConfig | None = None) -> torch.Tensor:
    """(K,) sum of strength times direction. Sums commute, so the order of sliders is without effect.

    Strengths are in standard deviations of the training models.

    Raises:
        VitrineError: an unknown label, a strength that is no number, or a slider on a protected label.
    """
    config = config or EditConfig()
    total = torch.zeros(space.dimension, dtype=torch.float64)
    for label, strength in strengths.items():
        if not abs(strength) < 1000:
            raise refuse(f"strength of {label}", strength, "-1000 .. 1000 deviations", "the training models span +-3")
        if label in config.protect:
            raise refuse("protect", label, "labels without a slider of their own", "drop it from one of the two")
        vector = without(named(space, label), [named(space, p) for p in config.protect], config.mode)
        total += float(strength) * vector.double()  # weights2weights, Eq. 2: theta + a n
    return total.float()


def edit(
    space: Space, coefficients: torch.Tensor, strengths: Mapping[str, float], config: EditConfig | None = None
) -> torch.Tensor:
    """Coefficients (..., K) moved by sliders. All strengths 0: the very same tensor values."""
    if not any(strengths.values()):
        return coefficients.clone()
    moved = shift(space, strengths, config)
    return _whole(space, coefficients) + moved.to(coefficients.device)


def edited_lora(
    space: Space, coefficients: torch.Tensor, strengths: Mapping[str, float], config: EditConfig | None = None,
    rank: int | None = None,
) -> dict[str, LoraLayer]:  # fmt: skip
    """The LoRA of one edited model (K,), the edit limited to ``config.blocks``. ``rank``: of delta spaces."""
    config = config or EditConfig()
    after = materialise(space, edit(space, coefficients, strengths, config), rank)
    if not config.blocks:
        return after
    before = materialise(space, coefficients, rank)
    return {path: (after if path.startswith(config.blocks) else before)[path] for path in before}


def materialise(space: Space, coefficients: torch.Tensor, rank: int | None = None) -> dict[str, LoraLayer]:
    """The LoRA of one model; delta spaces are re-factored to ``rank``."""
    return space.lora(coefficients, rank) if isinstance(space, DeltaSpace) else space.lora(coefficients)


def difference(after: Lora, before: Lora) -> dict[str, LoraLayer]:
    """The LoRA that turns one model into another on top of it: up = [B', -B], down = [A'; A], rank r' + r.

    Its product is B'A' - BA exactly; layers that did not change are left out.
    """
    out = {}
    for path in {**after, **before}:
        a, b = after.get(path), before.get(path)
        if a is not None and b is not None and torch.equal(a.down, b.down) and torch.equal(a.up, b.up):
            continue
        parts = [(x.down, sign * x.scale * x.up) for x, sign in ((a, 1.0), (b, -1.0)) if x is not None]
        down, up = torch.cat([d for d, _ in parts]), torch.cat([u for _, u in parts], 1)
        out[path] = LoraLayer(down, up, float(len(down)))
    return out


def blend(models: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
    """A weighted mean of models (K,) of one space; weights are normalised to sum 1 (default equal).

    Raises:
        VitrineError: other lengths, or weights that sum to 0.
    """
    if not models or len({m.shape for m in models}) != 1:
        raise refuse("models", [tuple(m.shape) for m in models], "one or more of one space", "use models of one space")
    shares = torch.tensor([1.0] * len(models) if weights is None else list(weights), dtype=torch.float64)
    if len(shares) != len(models) or abs(float(shares.sum())) < 1e-9:
        raise refuse("weights", weights, f"{len(models)} numbers that do not sum to 0", "0.5 and 0.5 is the middle")
    mixed = (shares / shares.sum()) @ torch.stack([m.double() for m in models])
    return mixed.float()


def share_inside(space: Space, lora: Lora) -> float:
    """The part of a foreign LoRA's distance from the mean model that lies in the space's span, 0 .. 1 (squared).

    Near 0 it adds to a model of the space without touching what the space says (weights2weights, appendix H). Measured
    in standardised numbers in factors mode, in weight changes in delta mode.
    """
    inside = float(space.encode_lora(lora).double().square().sum())
    if isinstance(space, DeltaSpace):
        apart = difference(lora, space.lora(torch.zeros(space.dimension)))
        whole = sum(float(layer.delta().double().square().sum()) for layer in apart.values())
    else:
        whole = float(((space.flatten(lora) - space.mean) / space.scale).double().square().sum())
    return min(1.0, inside / max(whole, 1e-30))


def _whole(space: Space, coefficients: torch.Tensor) -> torch.Tensor:
    """Coefficients padded with zeros to all K, so that edits of a short model keep what they add."""
    missing = space.dimension - coefficients.shape[-1]
    if missing < 0:
        given = coefficients.shape[-1]
        raise refuse("coefficients", given, f"up to {space.dimension}", "use the space they were made in")
    return torch.nn.functional.pad(coefficients, (0, missing)) if missing else coefficients
