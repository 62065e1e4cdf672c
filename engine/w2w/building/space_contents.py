"""A text description of models: nearest training models and scores on each direction."""

from __future__ import annotations

import torch

from ..edit.coefficient_sampling import closeness, nearest
from ..space.delta_space import Space
from ..space.directions import listed, reach, score


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


def contents(space: Space) -> str:
    """Describes a space: models, components, explained variance, and the range of each direction."""
    known = int((space.deviations > 0).sum())
    variance = f"{float(space.explained.double().sum()):.1%} of the variance"
    spread = "their spread unknown" if not known else f"with {variance}" if known == space.dimension else (
        f"the first {known} with {variance}, the others unknown")  # fmt: skip
    models = f"{space.count} models" if known else "an unknown number of models"
    lines = [f"{models}, {space.dimension} components {spread}, {space.mode}"]
    lines += [f"{label}: training models reach {reach(space, d):.1f}" for label, d in listed(space).items()]
    return "\n".join(lines)
