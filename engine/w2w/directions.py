"""Attribute directions in a space of models: least squares, logistic or group means, in units of one deviation.

weights2weights, section 3.3. A direction of length 1 here moves a model by one standard deviation of the training
models along it, so a slider at 2 is two deviations whatever the space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import refuse
from .delta import DeltaSpace
from .space import WeightSpace

Space = WeightSpace | DeltaSpace
METHODS = ("least_squares", "logistic", "means")
MODES = ("joint", "official_sequential")


def published_direction(space: Space, labels: torch.Tensor, components: int | None = None) -> torch.Tensor:
    """The official ``get_direction``: least squares without intercept on the coefficients, (K,), not normalised.

    Coefficient columns are orthogonal, so pinv(P) y needs no inverse; components beyond ``components`` stay zero.
    """
    p = _coefficients(space).double()
    used = min(components or space.dimension, space.dimension)
    found = torch.zeros(space.dimension, dtype=torch.float64)
    # weights2weights, editing: n = pinv(P) y = diag(1 / S^2) P^T y
    found[:used] = (p[:, :used].T @ _labels(space, labels).double()) / space.singular_values[:used].double() ** 2
    return found.float()


def direction(
    space: Space, labels: torch.Tensor, method: str = "least_squares", components: int | None = None
) -> torch.Tensor:
    """(K,) direction of an attribute, one standard deviation long.

    Args:
        labels: (N,) one number for each training model: classes 0 / 1 or -1 / +1, or any score. NaN leaves a model out.
        method: ``least_squares`` (the paper's) and ``logistic`` (scikit-learn; classes only) find what tells the
            classes apart best; ``means``, the difference of their means, moves a model from one to the other.
        components: how many to use; None takes a third of the models, at most all.

    Raises:
        VitrineError: another count of labels, one class only, an unknown method.
    """
    if method not in METHODS:
        raise refuse("method", method, METHODS, "least_squares is the paper's")
    y, used = _labels(space, labels), components or usual_components(space)
    known = ~y.isnan()
    if len(set(y[known].tolist())) < 2:
        given = f"{int(known.sum())} labels, all equal"
        raise refuse("labels", given, "two classes or more", "label models on both sides")
    used = min(used, space.dimension)
    if method == "least_squares" and bool(known.all()):
        return _unit(space, published_direction(space, y, used))
    p, y = _coefficients(space)[known][:, :used], y[known]
    found = torch.zeros(space.dimension)
    found[:used] = _logistic(p, y) if method == "logistic" else _means(p, y) if method == "means" else _solve(p, y)
    return _unit(space, found)


def joint_directions(
    space: Space, table: Mapping[str, torch.Tensor], exclusive: Sequence[Sequence[str]] = ()
) -> dict[str, torch.Tensor]:
    """Label -> (K,) direction: how coefficients change with each label while the others stay the same.

    All labels are regressed at once on the coefficients' side (coefficients ~ labels). Where ``least_squares`` gives
    the weights that *read* an attribute best, this gives what *has* it: the pattern to the filter of Haufe et al.
    2014. Moving along it arrives where models with the attribute are, and leaves the other labels alone. Each
    component is then shrunk by what chance alone would give it (James and Stein 1961, positive part), so that few
    models do not make a direction that also turns one person into another.

    Args:
        table: label -> (N,) numbers; unknown ones (NaN) count as average.
        exclusive: groups of labels of which a model trades one for another, as hair for other hair: they are not
            among what stays the same.

    Raises:
        VitrineError: another count of labels, a label that is the same for all, or too few models for the labels.
    """
    columns: dict[str, torch.Tensor] = {}
    for label, given in table.items():
        y = _labels(space, given)
        y = torch.where(y.isnan(), y.nanmean(), y)
        if float(y.std()) == 0:
            raise refuse(f"labels of {label}", "all equal", "two values or more", "label models on both sides")
        columns[label] = (y - y.mean()).double()
    p = _coefficients(space).double()
    p = p - p.mean(0)
    if len(p) < len(columns) + 2:
        raise refuse("models", len(p), f"more than {len(columns) + 1} for {len(columns)} labels", "train them singly")
    found = {}
    for label in columns:
        rivals = {other for group in exclusive if label in group for other in group} - {label}
        kept = [y for other, y in columns.items() if other not in rivals and other != label]
        found[label] = _unit(space, _pattern(p, torch.stack([columns[label], *kept], 1)).float())
    return found


def _pattern(p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(K,) change of centred coefficients (N, K) with the first of centred labels (N, L), less what is chance."""
    slopes = torch.linalg.lstsq(labels, p).solution
    left = (p - labels @ slopes).square().sum(0) / (len(p) - labels.shape[1] - 1)
    chance = left * torch.linalg.pinv(labels.T @ labels)[0, 0]
    shrunk = slopes[0] * (1 - chance / slopes[0].square().clamp_min(1e-30)).clamp_min(0)
    return shrunk if bool(shrunk.any()) else slopes[0]


def usual_components(space: Space) -> int:
    """A third of the number of models: the paper uses 1,000 of 10,000 for directions, lest they fit single models."""
    return max(1, min(int((space.singular_values > 0).sum()), space.count // 3))


def _solve(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    centred = (y - y.mean()).double()
    return torch.linalg.lstsq(p.double() - p.double().mean(0), centred[:, None]).solution[:, 0].float()


def _means(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    high = y > (y.min() + y.max()) / 2
    return p[high].mean(0) - p[~high].mean(0)


def _logistic(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from sklearn.linear_model import LogisticRegression

    spread = p.std(0).clamp_min(1e-12)
    classes = (y > (y.min() + y.max()) / 2).int().numpy()
    fitted = LogisticRegression(max_iter=2000).fit((p / spread).numpy(), classes)
    return torch.from_numpy(fitted.coef_[0]).float() / spread


def spread_along(space: Space, vector: torch.Tensor) -> float:
    """Standard deviation of the training models along a direction: sqrt(u^T diag(sigma^2) u) for unit u."""
    unit = vector / vector.norm().clamp_min(1e-30)
    return float((unit * space.deviations[: len(vector)]).norm())


def _unit(space: Space, vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm().clamp_min(1e-30) * spread_along(space, vector)


def reach(space: Space, vector: torch.Tensor) -> float:
    """The paper's step length (section 4.3) in deviations: the farthest training model along the direction."""
    unit = vector / vector.norm().clamp_min(1e-30)
    return float((_coefficients(space) @ unit).abs().max()) / spread_along(space, vector)


def score(vector: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Where models (..., K) stand along a direction, in deviations from the mean model."""
    return (coefficients @ vector) / vector.dot(vector)


def without(vector: torch.Tensor, others: Sequence[torch.Tensor], mode: str = "joint") -> torch.Tensor:
    """A direction cleared of others: moving along it leaves their scores alone.

    ``official_sequential`` is the published ``debias``, one after another in the caller's order, which is exact for
    the last one only; ``joint`` projects onto the complement of their span.
    """
    if mode not in MODES:
        raise refuse("mode", mode, MODES, "joint clears all of them")
    if mode == "official_sequential":
        for other in others:
            # weights2weights, editing: n <- n - (n . d / |d|^2) d
            vector = vector - vector.dot(other) / other.dot(other) * other
        return vector
    if not others:
        return vector
    basis, _ = torch.linalg.qr(torch.stack(list(others), 1).double())
    return (vector.double() - basis @ (basis.T @ vector.double())).float()


@dataclass(frozen=True)
class Quality:
    """What directions are worth.

    Attributes:
        accuracy: label -> share of held-out models on the right side (5 folds); 0.5 is chance for even classes.
        balanced: the same with both classes counting equally.
        entanglement: (L, L) |cosine| between directions, the quantity of the paper's Fig. 9.
        labels: the order of its rows.
    """

    accuracy: dict[str, float]
    balanced: dict[str, float]
    entanglement: torch.Tensor
    labels: tuple[str, ...]


def quality(
    space: Space, table: Mapping[str, torch.Tensor], method: str = "least_squares", components: int | None = None,
    folds: int = 5,
) -> Quality:  # fmt: skip
    """Held-out accuracy of each label's direction, and how much the directions share."""
    accuracy, balanced, found = {}, {}, []
    for label, given in table.items():
        y = _labels(space, given)
        high = y > (y[~y.isnan()].min() + y[~y.isnan()].max()) / 2
        hits = _held_out(space, y, high, method, components, folds)
        sides = [hits[side].nanmean() for side in (high, ~high)]
        accuracy[label], balanced[label] = float(hits.nanmean()), float(sum(sides) / 2)
        found.append(direction(space, y, method, components))
    unit = torch.nn.functional.normalize(torch.stack(found), dim=1)
    return Quality(accuracy, balanced, (unit @ unit.T).abs(), tuple(table))


def _held_out(
    space: Space, y: torch.Tensor, high: torch.Tensor, method: str, components: int | None, folds: int
) -> torch.Tensor:
    """(N,) 1 where a model left out of the fit falls on its own side of the training models' middle."""
    p, fold = _coefficients(space), torch.arange(len(y)) % folds
    hits = torch.full((len(y),), float("nan"))
    for i in range(folds):
        kept = (fold != i) & ~y.isnan()
        if len(set(high[kept].tolist())) < 2:  # too few labels for this fold to tell anything
            continue
        d = direction(space, torch.where(kept, y, torch.nan), method, components)
        scores = p @ d
        middle = (scores[kept & high].mean() + scores[kept & ~high].mean()) / 2
        out = (fold == i) & ~y.isnan()
        hits[out] = ((scores[out] > middle) == high[out]).float()
    return hits


def with_directions(space: Space, found: Mapping[str, torch.Tensor]) -> Any:
    """The space with these directions added (same labels are replaced)."""
    return replace(space, directions={**space.directions, **{k: v.float() for k, v in found.items()}})


def named(space: Space, label: str) -> torch.Tensor:
    """A direction of the space by label.

    Raises:
        VitrineError: no such direction; the nearest labels are named.
    """
    from difflib import get_close_matches

    if label not in space.directions:
        near = get_close_matches(label, space.directions, n=3, cutoff=0.4)
        known = sorted(space.directions)
        raise refuse("direction", label, known, f"Did you mean {', '.join(near)}?" if near else "train it first")
    return space.directions[label]


def _coefficients(space: Space) -> torch.Tensor:
    if not len(space.coefficients):
        raise refuse("space", "without its models' coefficients", "a space that holds them", "build it anew")
    return space.coefficients.float()


def _labels(space: Space, labels: torch.Tensor) -> torch.Tensor:
    y = torch.as_tensor(labels, dtype=torch.float32).flatten()
    if len(y) != len(space.coefficients):
        given = f"{len(y)} labels"
        raise refuse("labels", given, f"one for each of {len(space.coefficients)} models", "see space.names")
    return y
