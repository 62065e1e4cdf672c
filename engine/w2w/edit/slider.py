"""An edit as one LoRA that any tool loads with a model, whose strength -1 .. 1 is the slider; and sliders as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...errors import refuse
from ...io.lora_layer import LoraLayer
from ...settings.one_line import one_line
from ..loras.low_rank import refactor, squared_change
from ..space.delta_space import DeltaSpace, Space
from .editing import difference, materialise


@one_line
@dataclass(frozen=True)
class Slider:
    """A slider LoRA.

    Attributes:
        lora: added at strength s to the model ``before``, it approximates the model at before + s (after - before).
        missed: (at -1, at 1) |update of the LoRA - update of the edit|^2 / |update of the edit|^2.
    """

    lora: dict[str, LoraLayer]
    missed: tuple[float, float]

    def summary(self) -> str:
        """As text."""
        low, high = self.missed
        ranks = sorted({layer.rank for layer in self.lora.values()})
        shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} .. {ranks[-1]}"
        return f"slider of rank {shown}; misses {high:.2%} of the edit's change at strength 1, {low:.2%} at -1"


def slider_lora(
    space: Space, before: torch.Tensor, after: torch.Tensor, rank: int | None = None, one_sided: bool = False
) -> Slider:
    """The difference of two models (K,) as a LoRA that is linear in its strength.

    A delta space is linear in its coefficients, so the slider is the edit, for every model of the space. In factors
    mode an edit moves both factors: (B + s dB)(A + s dA) - BA = s (dB A + B dA) + s^2 dB dA. The slider is the first
    term, accurate near ``before`` in both directions; ``one_sided`` is exact at s = 1, with a larger error
    below 0. The error is measured.

    Args:
        rank: largest rank per layer; None is exact, twice the space's rank in factors mode.
        one_sided: exact at strength 1. Without effect in delta spaces, where both are equal.
    """
    k = max(len(before), len(after))
    before, after = (torch.nn.functional.pad(v.float().cpu(), (0, k - len(v))) for v in (before, after))
    if torch.equal(before, after):
        raise refuse("slider", "an edit that changes nothing", "two different models", "give a strength other than 0")
    if rank is not None and rank < 1:
        raise refuse("rank", rank, "1 or more", "leave it out for the exact slider")
    whole, shrunk = _whole(space, before, after, one_sided), rank is not None or isinstance(space, DeltaSpace)
    lora = {path: refactor(layer, rank) for path, layer in whole.items()} if shrunk else whole
    middle = _exact(space, before)
    missed = []
    for sign in (-1.0, 1.0):
        edit = difference(_exact(space, before + sign * (after - before)), middle)
        signed = {p: LoraLayer(v.down, sign * v.up, v.alpha) for p, v in lora.items()}
        missed.append(squared_change(difference(signed, edit)) / max(squared_change(edit), 1e-300))
    return Slider(lora, (missed[0], missed[1]))


def _whole(space: Space, before: torch.Tensor, after: torch.Tensor, one_sided: bool) -> dict[str, LoraLayer]:
    if isinstance(space, DeltaSpace):
        return _delta_slider(space, after - before)
    return difference(_exact(space, after), _exact(space, before)) if one_sided else _tangent(space, before, after)


def _exact(space: Space, coefficients: torch.Tensor) -> dict[str, LoraLayer]:
    return space.stacked(coefficients) if isinstance(space, DeltaSpace) else materialise(space, coefficients)


def _delta_slider(space: DeltaSpace, move: torch.Tensor) -> dict[str, LoraLayer]:
    """sum_i (dc)_i B_i A_i of each layer, with all factors concatenated."""
    weights = space.weights(move) - space.weights(torch.zeros_like(move))
    return {
        path: LoraLayer(stack.down, stack.up * weights[stack.owner], float(len(stack.down)))
        for path, stack in space.stacks.items()
    }


def _tangent(space: Space, before: torch.Tensor, after: torch.Tensor) -> dict[str, LoraLayer]:
    """s (dB A + B dA): up = [dB, B], down = [A; dA]."""
    start, end = materialise(space, before), materialise(space, after)
    out = {}
    for path, a in start.items():
        d_up, d_down = end[path].up - a.up, end[path].down - a.down
        up = a.scale * torch.cat([d_up, a.up], 1)
        out[path] = LoraLayer(torch.cat([a.down, d_down]), up, float(2 * a.rank))
    return out


def sliders_of(texts: Iterable[str], sign: str) -> dict[str, float]:
    """Label -> number from texts such as ``beard: 2``; empty ones are left out.

    Args:
        sign: between the two, ``:`` in a node and ``=`` on the command line.
    """
    strengths: dict[str, float] = {}
    for text in filter(None, (text.strip() for text in texts)):
        label, _, number = text.rpartition(sign)
        try:
            strength = float(number)
        except ValueError:
            strength = math.nan
        if not label.strip() or not math.isfinite(strength) or label.strip() in strengths:
            example = "beard=2" if sign == "=" else "beard: 2"
            raise refuse("slider", text, f"label{sign}number, each label once", f"write {example}")
        strengths[label.strip()] = strength
    return strengths
