"""Projection of a LoRA, or of a training model by name, into a space, and the fraction that it captures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch

from ...errors import refuse
from ...io.lora_layer import Lora
from ...settings.one_line import one_line
from ..edit.coefficient_sampling import closeness, nearest
from ..edit.editing import difference, materialise
from ..loras.low_rank import squared_change
from ..space.delta_space import DeltaSpace, Space, member_names
from ..space.directions import listed, score
from ..space.linked_factors import LinkedStacks
from ..space.model_file import W2WModel


def described(space: Space, coefficients: torch.Tensor) -> str:
    """Describes models (B, k): nearest training models and strongest attributes.

    Both are unknown if the space has no coefficients of its training models.
    """
    lines, close = [], closeness(space)
    for i, near in enumerate(nearest(space, coefficients, 3)):
        names = ", ".join(f"{n.name} {n.cosine:.2f}" for n in near) or "unknown, as the space names no training models"
        lines.append(f"model {i}: nearest {names}")
        if near and near[0].cosine > close:
            lines.append(f"  closer to {near[0].name} than 95 % of the training models are to each other")
        k = coefficients.shape[-1]
        scores = {label: float(score(d[:k], coefficients[i])) for label, d in listed(space).items()}
        strong = sorted(scores.items(), key=lambda item: -abs(item[1]))[:6]
        if strong:
            lines.append("  " + ", ".join(f"{label} {value:+.1f}" for label, value in strong))
    return "\n".join(lines)


@one_line
@dataclass(frozen=True)
class Encoded:
    """The nearest model of a space, and how near it is.

    Attributes:
        model: one row of coefficients.
        captured: fraction, 0 .. 1, of the LoRA's squared weight update that the model captures; None for a
            training model by name, whose file is not available.
        ignored: number of the LoRA's layers that the space does not have.
    """

    model: W2WModel
    captured: float | None
    ignored: int = 0

    def summary(self, space: Space) -> str:
        """As text: what is captured, what is not, and the model's neighbours and scores."""
        if self.captured is None:
            fraction = float(space.explained.double().sum())
            lines = [f"a training model, as represented in the space: with {fraction:.1%} of the variance of all"]
        else:
            lines = [f"the space captures {self.captured:.1%} of this LoRA's weight update"]
            if self.captured < 0.5:
                lines.append("most of it is outside the space: the result differs; add the LoRA to the space's folder")
        if self.ignored:
            lines.append(f"{self.ignored} layers are not in the space")
        return "\n".join([*lines, described(space, self.model.coefficients)])


def layer_sizes(space: Space) -> dict[str, tuple[int, int]]:
    """Layer path -> (out, in) in a space, which a LoRA must match."""
    if not isinstance(space, DeltaSpace):
        return {layer.path: (layer.up[0], math.prod(layer.down[1:])) for layer in space.manifest}
    if isinstance(space.stacks, LinkedStacks):
        return {path: entry.outer for file in space.stacks.files for path, entry in file.entries.items()}
    return {path: stack.outer for path, stack in space.stacks.items()}


def encode(space: Space, lora: Lora, name: str = "") -> Encoded:
    """The model of a space nearest to a LoRA: in standardised factors, or in delta mode in weight updates.

    Args:
        name: name of the LoRA, for the model's history.
    """
    known = set(space.stacks) if isinstance(space, DeltaSpace) else {layer.path for layer in space.manifest}
    inside = {path: layer for path, layer in lora.items() if path in known}
    if not inside:
        shown = f"{next(iter(lora), 'no layers')} .."
        raise refuse("LoRA layers", shown, f"{sorted(known)[0]} ..", "choose a LoRA of the space's base model")
    if isinstance(space, DeltaSpace):
        products = space.products_with(inside)
        coefficients = space.encode_products(products)
        weights = space.weights(coefficients).double()
        # |L - sum c_i M_i|^2 = |L|^2 - 2 c <L, M> + c G c, without the sum
        missed = squared_change(lora) - float(2 * weights @ products - weights @ space.gram @ weights)
    else:
        coefficients = space.encode_lora(lora)
        missed = squared_change(difference(lora, materialise(space, coefficients)))
    captured = min(1.0, max(0.0, 1 - missed / max(squared_change(lora), 1e-300)))
    model = W2WModel(coefficients[None], space.identity, ({"encode": {"lora": name, "held": round(captured, 4)}},))
    return Encoded(model, captured, len(lora) - len(inside))


def member(space: Space, name: str) -> Encoded:
    """A training model by its name."""
    names = member_names(space)
    if name not in names:
        near = get_close_matches(name, names, n=3, cutoff=0.4) or list(names[:3])
        shown = f"names such as {', '.join(near)}" if names else "names; this space has none of its models"
        raise refuse("model of the space", name, shown, "encode its LoRA file instead")
    row = space.coefficients[names.index(name)].float()
    row = torch.nn.functional.pad(row, (0, space.dimension - len(row)))
    return Encoded(W2WModel(row[None], space.identity, ({"encode": {"member": name}},)), None)


def official_model(path: str | Path, space: Space) -> W2WModel:
    """``w2wmodel.pt`` of the published code, (B, k) coefficients in the published space.

    Opened with ``weights_only=True``: nothing is unpickled.
    """
    from ..space.official_files import coefficients_in

    if space.info.get("source") != "official":
        shown = f"{Path(path).name} with another space"
        raise refuse("model", shown, "the imported published space", "vitrine w2w import-official makes it")
    rows = coefficients_in(Path(path), space.dimension)
    centre = torch.tensor(space.info.get("centre", [0.0]))
    centre = torch.nn.functional.pad(centre, (0, space.dimension - len(centre)))
    return W2WModel(rows - centre, space.identity, ({"encode": {"official": Path(path).name}},))
