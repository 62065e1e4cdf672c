"""Attribute directions in a space of models (weights2weights, section 3.3): least squares, logistic or group means.

Adding a direction once moves a model by one standard deviation of the training models along it, so a slider at 2 is
two deviations in every space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ...errors import refuse
from ...settings.one_line import one_line
from ...settings.w2w_options import PROTECTIONS
from .delta_space import Space
from .space_checks import check_components

S = TypeVar("S", bound=Space)
METHODS = ("least_squares", "logistic", "means")


def published_direction(space: Space, labels: torch.Tensor, components: int | None = None) -> torch.Tensor:
    """The official ``get_direction``: least squares without intercept on the coefficients, (K,), not normalised.

    Coefficient columns are orthogonal, so pinv(P) y needs no inverse. Components beyond ``components`` stay zero.
    """
    check_components(components)
    p = _coefficients(space).double()
    used = min(components or space.dimension, p.shape[1])
    normal = torch.zeros(space.dimension, dtype=torch.float64)
    # weights2weights, editing: n = pinv(P) y = diag(1 / S^2) P^T y
    normal[:used] = (p[:, :used].T @ _labels(space, labels).double()) / space.singular_values[:used].double() ** 2
    return normal.float()


def direction(
    space: Space, labels: torch.Tensor, method: str = "least_squares", components: int | None = None
) -> torch.Tensor:
    """(K,) direction of an attribute, of length one standard deviation.

    Args:
        labels: (N,) one number per training model: classes 0 / 1 or -1 / +1, or any score. NaN leaves a model out.
        method: ``least_squares`` (the paper's) and ``logistic`` (scikit-learn; classes only) find what separates the
            classes best; ``means``, the difference of their means, moves a model from one to the other.
        components: number of components to use; None takes a third of the number of models.
    """
    if method not in METHODS:
        raise refuse("method", method, METHODS, "least_squares is the paper's")
    check_components(components)
    y, used = _labels(space, labels), components or usual_components(space)
    known = ~y.isnan()
    if len(set(y[known].tolist())) < 2:
        number = int(known.sum())
        shown = f"{number} labelled models, none different" if number else "none that fits a model of this space"
        remedy = "write one line for each model with a 1 and one for each with a 0"
        raise refuse("labels", shown, "models of two kinds: with the attribute and without", remedy)
    used = min(used, space.coefficients.shape[1])
    if method == "least_squares" and bool(known.all()):
        return one_deviation(space, published_direction(space, y, used))
    p, y = _coefficients(space)[known][:, :used], y[known]
    fit = {"logistic": _logistic, "means": _means, "least_squares": _least_squares}[method]
    return one_deviation(space, _padded(space, fit(p, y)))


def joint_directions(
    space: Space, table: Mapping[str, torch.Tensor], exclusive: Sequence[Sequence[str]] = ()
) -> dict[str, torch.Tensor]:
    """Label -> (K,) direction: how coefficients change with each label while the others are constant.

    Coefficients are regressed on all labels at once. While ``least_squares`` gives the weights that best *read* an
    attribute (a filter), this gives the mean difference of models with the attribute (a pattern; Haufe et al. 2014):
    moving along it leads towards such models and keeps other labels. Each component is shrunk by its expected chance
    value (James and Stein 1961, positive part), so that a direction from few models does not also change the identity.

    Args:
        table: label -> (N,) numbers; unknown ones (NaN) count as average.
        exclusive: groups of mutually exclusive labels, such as hair styles: these are not kept
            constant for each other.
    """
    columns: dict[str, torch.Tensor] = {}
    for label, values in table.items():
        y = _labels(space, values)
        y = torch.where(y.isnan(), y.nanmean(), y)
        if float(y.std()) == 0:
            remedy = "label some models with the attribute and some without"
            raise refuse(f"labels of {label}", "one value for all models", "two values or more", remedy)
        columns[label] = (y - y.mean()).double()
    p = _coefficients(space).double()
    p = p - p.mean(0)
    if len(p) < len(columns) + 2:
        raise refuse("models", len(p), f"more than {len(columns) + 1} for {len(columns)} labels", "train each alone")
    directions = {}
    for label in columns:
        rivals = {other for group in exclusive if label in group for other in group} - {label}
        constant = [y for other, y in columns.items() if other not in rivals and other != label]
        pattern = _pattern(p, torch.stack([columns[label], *constant], 1)).float()
        directions[label] = one_deviation(space, _padded(space, pattern))
    return directions


def _pattern(p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(K,) change of centred coefficients (N, K) with the first of centred labels (N, L), shrunk by chance."""
    slopes = torch.linalg.lstsq(labels, p).solution
    residual = (p - labels @ slopes).square().sum(0) / (len(p) - labels.shape[1] - 1)
    chance = residual * torch.linalg.pinv(labels.T @ labels)[0, 0]
    shrunk = slopes[0] * (1 - chance / slopes[0].square().clamp_min(1e-30)).clamp_min(0)
    return shrunk if bool(shrunk.any()) else slopes[0]


def usual_components(space: Space) -> int:
    """A third of the number of models: like the paper's 1,000 components, to avoid overfitting."""
    return max(1, min(int((space.singular_values > 0).sum()), space.count // 3))


def _least_squares(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
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


def one_deviation(space: Space, vector: torch.Tensor) -> torch.Tensor:
    """A direction (K,) scaled to one standard deviation of the training models along it."""
    return vector / vector.norm().clamp_min(1e-30) * spread_along(space, vector)


def reach(space: Space, vector: torch.Tensor) -> float:
    """The farthest training model along a direction, in deviations: the paper's step length (section 4.3)."""
    unit = vector / vector.norm().clamp_min(1e-30)
    known = _coefficients(space)
    return float((known @ unit[: known.shape[1]]).abs().max()) / spread_along(space, vector)


def score(vector: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Scores of models (..., K) along a direction, in deviations from the mean model."""
    return (coefficients @ vector) / vector.dot(vector)


def without(vector: torch.Tensor, others: Sequence[torch.Tensor], mode: str = "joint") -> torch.Tensor:
    """A direction without its component along others: moving along it keeps their scores.

    ``official_sequential`` is the published ``debias``: sequential in the caller's order, exact only for the last
    one. ``joint`` projects onto the complement of their span.
    """
    if mode not in PROTECTIONS:
        raise refuse("mode", mode, PROTECTIONS, "joint clears all of them")
    if mode == "official_sequential":
        for other in others:
            # weights2weights, editing: n <- n - (n . d / |d|^2) d
            vector = vector - vector.dot(other) / other.dot(other) * other
        return vector
    if not others:
        return vector
    basis, _ = torch.linalg.qr(torch.stack(list(others), 1).double())
    return (vector.double() - basis @ (basis.T @ vector.double())).float()


@one_line
@dataclass(frozen=True)
class Quality:
    """Separation of attributes by their directions.

    Attributes:
        accuracy: label -> fraction of held-out models on the correct side; 0.5 is chance for even classes.
        balanced: likewise with both classes weighted equally.
        entanglement: (L, L) |cosine| between directions (weights2weights, Fig. 9).
        labels: the order of its rows.
    """

    accuracy: dict[str, float]
    balanced: dict[str, float]
    entanglement: torch.Tensor
    labels: tuple[str, ...]


CHANCE = 0.5
"""Balanced accuracy of a slider that knows nothing, of two classes."""


def beats_chance(balanced: float, models: int) -> bool:
    """Whether a balanced accuracy on held-out models is above chance by more than guessing gives in 1 of 20 cases."""
    return balanced - 1.645 * (CHANCE * (1 - CHANCE) / max(1, models)) ** 0.5 > CHANCE


def quality(
    space: Space,
    table: Mapping[str, torch.Tensor],
    method: str = "least_squares",
    components: int | None = None,
    folds: int = 5,
) -> Quality:
    """Cross-validated accuracy of each label's direction, and the similarity of the directions."""
    accuracy, balanced, directions = {}, {}, []
    p = _coefficients(space)
    for label, values in table.items():
        y = _labels(space, values)
        high = y > (y[~y.isnan()].min() + y[~y.isnan()].max()) / 2
        fold = torch.arange(len(y)) % folds
        # 1 if a held-out model is on the correct side of the fitted models' midpoint, else 0; NaN if unknown
        hits = torch.full((len(y),), float("nan"))
        for i in range(folds):
            fitted = (fold != i) & ~y.isnan()
            if len(set(high[fitted].tolist())) < 2:  # one class only: nothing to fit
                continue
            d = direction(space, torch.where(fitted, y, torch.nan), method, components)
            scores = p @ d[: p.shape[1]]
            midpoint = (scores[fitted & high].mean() + scores[fitted & ~high].mean()) / 2
            held_out = (fold == i) & ~y.isnan()
            hits[held_out] = ((scores[held_out] > midpoint) == high[held_out]).float()
        sides = [hits[side].nanmean() for side in (high, ~high)]
        accuracy[label], balanced[label] = float(hits.nanmean()), float(sum(sides) / 2)
        directions.append(direction(space, y, method, components))
    unit = torch.nn.functional.normalize(torch.stack(directions), dim=1)
    return Quality(accuracy, balanced, (unit @ unit.T).abs(), tuple(table))


def with_directions(space: S, directions: Mapping[str, torch.Tensor]) -> S:
    """The space with these directions added; existing labels are replaced."""
    return replace(space, directions={**space.directions, **{k: v.float() for k, v in directions.items()}})


def listed(space: Space) -> dict[str, torch.Tensor]:
    """The listed directions: all except ``space.info["retired"]``.

    Retired ones have too little effect for a slider, but describe the training models and take part in sampling.
    """
    retired = space.info.get("retired", ())
    return {label: d for label, d in space.directions.items() if label not in retired}


def labelled(space: Space) -> dict[str, torch.Tensor]:
    """The directions that describe the training models: all except sliders trained from pairs (``pair_slider.py``)."""
    trained = space.info.get("pair_sliders", {})
    return {label: d for label, d in space.directions.items() if label not in trained}


def direction_named(space: Space, label: str) -> torch.Tensor:
    """A direction of the space by label."""
    if label not in space.directions:
        raise refuse("direction", label, sorted(space.directions), "train it first")
    return space.directions[label]


def _padded(space: Space, vector: torch.Tensor) -> torch.Tensor:
    """Pads with zeros for components with unknown or unused coefficients."""
    return torch.nn.functional.pad(vector, (0, space.dimension - len(vector)))


def _coefficients(space: Space) -> torch.Tensor:
    if not len(space.coefficients):
        raise refuse("space", "without its models' coefficients", "a space that contains them", "build it again")
    return space.coefficients.float()


def _labels(space: Space, labels: torch.Tensor) -> torch.Tensor:
    y = torch.as_tensor(labels, dtype=torch.float32).flatten()
    if len(y) != len(space.coefficients):
        shown = f"{len(y)} labels"
        raise refuse("labels", shown, f"one for each of {len(space.coefficients)} models", "see space.names")
    return y
