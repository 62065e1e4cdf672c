"""Edits models along directions, and expresses an edit as a separate LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import expect, refuse
from ...io.lora_layer import Lora, LoraLayer
from ...io.number_checks import refuse_unless_finite
from ...runtime.finite import require_finite
from ...settings.w2w_options import EditConfig
from ..loras.low_rank import fraction_kept, refactor, squared_change
from ..space.delta_space import DeltaSpace, Space
from ..space.directions import direction_named, without
from ..space.model_file import W2WModel


def shift(space: Space, strengths: Mapping[str, float], config: EditConfig | None = None) -> torch.Tensor:
    """(K,) sum of strength times direction; the order of sliders does not matter.

    Args:
        strengths: label -> standard deviations of the training models, about -3 .. 3.
    """
    config = config or EditConfig()
    total = torch.zeros(space.dimension, dtype=torch.float64)
    for label, strength in strengths.items():
        if not abs(strength) < 1000:
            raise refuse(f"strength of {label}", strength, "-1000 .. 1000 deviations", "the training models span +-3")
        if label in config.protect:
            raise refuse("protect", label, "labels without a separate slider", "drop it from one of the two")
        protected = [direction_named(space, p) for p in config.protect]
        vector = without(direction_named(space, label), protected, config.mode)
        # weights2weights, Eq. 2: theta_edit = theta + a n, here in coefficients: a n = sum of strength x direction
        total += float(strength) * vector.double()
    return total.float()


def edit_step(strengths: Mapping[str, float], config: EditConfig | None = None) -> dict[str, Any]:
    """The record of an edit: strengths in deviations, and its start if not 1000.

    It is for :meth:`..space.model_file.W2WModel.moved_to`.
    """
    start = (config or EditConfig()).start_timestep
    return {"edit": dict(strengths)} | ({"start": start} if start < 1000 else {})


def edit(
    space: Space, coefficients: torch.Tensor, strengths: Mapping[str, float], config: EditConfig | None = None
) -> torch.Tensor:
    """Coefficients (..., K) moved by sliders; unchanged bit for bit if all strengths are 0."""
    if not any(strengths.values()):
        return coefficients.clone()
    # weights2weights, Eq. 2: theta + a n
    return _padded(space, coefficients) + shift(space, strengths, config).to(coefficients.device)


def edited_lora(
    space: Space,
    coefficients: torch.Tensor,
    strengths: Mapping[str, float],
    config: EditConfig | None = None,
    rank: int | None = None,
) -> dict[str, LoraLayer]:
    """The LoRA of one edited model (K,), the edit limited to ``config.blocks``; ``rank`` as in :func:`materialise`."""
    config = config or EditConfig()
    after = materialise(space, edit(space, coefficients, strengths, config), rank)
    if not config.blocks:
        return after
    before = materialise(space, coefficients, rank)
    return {path: (after if path.startswith(config.blocks) else before)[path] for path in before}


def materialise(space: Space, coefficients: torch.Tensor | W2WModel, rank: int | None = None) -> dict[str, LoraLayer]:
    """The LoRA of one model, given as itself or as its coefficients (K,).

    It is re-factored to at most ``rank``; None keeps it exact, bit for bit in factors mode.
    """
    expect(space, Space, "space", "load_space(file) reads one")
    expect(coefficients, torch.Tensor | W2WModel, "model", "W2WPipeline.sample_models makes some")
    if isinstance(coefficients, W2WModel):
        coefficients = coefficients.only(space)
    require_finite(coefficients, "coefficients", "sample or edit the model again")
    if rank is not None and rank < 1:
        raise refuse("rank", rank, "1 or more", "leave it out for the exact model")
    if isinstance(space, DeltaSpace):
        return space.lora(coefficients, rank)
    lora = space.lora(coefficients)
    return {p: v if rank is None or v.rank <= rank else refactor(v, rank) for p, v in lora.items()}


def change_kept(space: Space, coefficients: torch.Tensor, lora: Lora) -> float:
    """The fraction, 0 .. 1, of a model's (K,) squared weight update that its re-factored ``lora`` keeps.

    In delta mode the full update is never formed: sum_i c_i M_i has the squared norm c G c.
    """
    if not isinstance(space, DeltaSpace):
        return fraction_kept(space.lora(coefficients), lora)
    weights = space.weights(coefficients).double()
    return min(1.0, squared_change(lora) / max(float(weights @ space.gram @ weights), 1e-300))


def difference(after: Lora, before: Lora) -> dict[str, LoraLayer]:
    """The LoRA that turns one model into another when added to it: up = [B', -B], down = [A'; A], rank r' + r.

    Its product is B'A' - BA exactly; unchanged layers are left out.
    """
    out = {}
    for path in {**after, **before}:
        a, b = after.get(path), before.get(path)
        if a is not None and b is not None and torch.equal(a.down, b.down) and torch.equal(a.up, b.up):
            continue
        signed = [(layer, sign) for layer, sign in ((a, 1.0), (b, -1.0)) if layer is not None]
        down = torch.cat([layer.down for layer, _ in signed])
        up = torch.cat([sign * layer.scale * layer.up for layer, sign in signed], 1)
        out[path] = LoraLayer(down, up, float(len(down)))
    return out


def blend(models: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
    """A weighted mean of models (K,) of one space; weights (default equal) are normalised to sum 1."""
    if not models or len({m.shape for m in models}) != 1:
        raise refuse("models", [tuple(m.shape) for m in models], "one or more of one space", "use models of one space")
    fractions = torch.tensor([1.0] * len(models) if weights is None else list(weights), dtype=torch.float64)
    refuse_unless_finite("weights", *fractions.tolist())
    if len(fractions) != len(models) or abs(float(fractions.sum())) < 1e-9:
        raise refuse("weights", weights, f"{len(models)} numbers that do not sum to 0", "0.5 and 0.5 is the mean")
    mixed = (fractions / fractions.sum()) @ torch.stack([m.double() for m in models])
    return mixed.float()


def fraction_inside(space: Space, lora: Lora) -> float:
    """The fraction, 0 .. 1, of another LoRA's squared distance from the mean model that is in the space's span.

    A LoRA near 0 can be added to a model without changing what the space describes (weights2weights,
    appendix H). Distances are of standardised weights in factors mode, of weight changes in delta mode.
    """
    inside = float(space.encode_lora(lora).double().square().sum())
    if isinstance(space, DeltaSpace):
        offset = difference(lora, space.lora(torch.zeros(space.dimension)))
        whole = sum(float(layer.delta().double().square().sum()) for layer in offset.values())
    else:
        whole = float(((space.flatten(lora) - space.mean) / space.scale).double().square().sum())
    return min(1.0, inside / max(whole, 1e-30))


def _padded(space: Space, coefficients: torch.Tensor) -> torch.Tensor:
    """Coefficients padded with zeros to K, so that an edit of a shorter model is complete."""
    missing = space.dimension - coefficients.shape[-1]
    if missing < 0:
        shown = coefficients.shape[-1]
        raise refuse("coefficients", shown, f"up to {space.dimension}", "use the space that they belong to")
    return torch.nn.functional.pad(coefficients, (0, missing)) if missing else coefficients
