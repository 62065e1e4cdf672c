"""Layout of a space's models in a plane that preserves neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ...errors import refuse
from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from .delta_space import Space, member_names
from .directions import score

S = TypeVar("S", bound=Space)
METHODS = ("auto", "neighbours", "components")
LARGEST = 3000
"""Most models that ``auto`` lays out by neighbours, which needs an (N, N) matrix."""
NEIGHBOURS = 8


@one_line
@dataclass(frozen=True)
class SpaceMap:
    """A space laid out in a plane, for a page or a widget.

    Attributes:
        coordinates: (N, 2) in -1 .. 1.
        method: ``neighbours`` (t-SNE) or ``components`` (the first two principal ones).
        labels: label -> (N,) score of each model, in deviations; or values of a label table, NaN if unknown.
        kept: fraction of each model's nearest ``NEIGHBOURS`` in the space that are also nearest in the plane.
        chance: that fraction for a random layout.
    """

    coordinates: torch.Tensor
    method: str
    labels: Mapping[str, torch.Tensor]
    kept: float
    chance: float


def map_of(
    space: Space,
    labels: Mapping[str, torch.Tensor] | None = None,
    method: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> SpaceMap:
    """The map in the space's file, or a new one if it has none or a method is given.

    Distances are between coefficients (components are weighted by their variance).

    Args:
        labels: in addition to, or replacing, the space's directions.
    """
    if method not in METHODS:
        raise refuse("map", method, METHODS, "auto lays out by neighbours where it can")
    rows = space.coefficients.float()
    if len(rows) < 3:
        raise refuse("map", f"{len(rows)} models' coefficients", "three or more", "build the space from its LoRAs")
    k = rows.shape[1]
    table = {label: score(d[:k], rows) for label, d in space.directions.items()}
    stored = space.info.get("map", {}) if method == "auto" else {}
    table |= {
        label: torch.tensor([math.nan if v is None else v for v in column])
        for label, column in stored.get("labels", {}).items()
    } | dict(labels or {})
    if len(stored.get("coordinates", ())) == len(rows):
        positions, used = torch.tensor(stored["coordinates"], dtype=torch.float32), str(stored["method"])
    else:
        used = method if method != "auto" else "neighbours" if len(rows) <= LARGEST else "components"
        positions = _components(rows)
        if used == "neighbours":
            positions = _by_neighbours(rows, positions, seed, progress)
    positions = positions - (positions.amax(0) + positions.amin(0)) / 2
    positions = positions / positions.abs().max().clamp_min(1e-12)
    count = min(NEIGHBOURS, len(rows) - 1)
    return SpaceMap(positions, used, table, neighbours_kept(rows, positions, count), count / (len(rows) - 1))


def with_map(space: S, layout: SpaceMap, labels: Mapping[str, torch.Tensor] | None = None) -> S:
    """The space with its map, which its file stores: coordinates, and labels in addition to the directions' scores."""
    columns = {
        label: [None if math.isnan(v) else round(v, 4) for v in column.tolist()]
        for label, column in (labels or {}).items()
    }
    rows = [[round(v, 4) for v in row] for row in layout.coordinates.tolist()]
    stored: dict[str, Any] = {"coordinates": rows, "method": layout.method, "labels": columns}
    return replace(space, info={**space.info, "map": stored})


def mapped(space: S, labels: Mapping[str, torch.Tensor] | None = None) -> S:
    """The space with a map, its own if it has one; unchanged if it has too few models."""
    if len(space.coefficients) < 3:
        return space
    before = map_of(space)
    stored = {label: before.labels[label] for label in space.info.get("map", {}).get("labels", {})}
    return with_map(space, before, {**stored, **(labels or {})})


def neighbours_of(
    space: Space, count: int = NEIGHBOURS, chosen: Sequence[int] | None = None
) -> dict[int, list[tuple[str, float]]]:
    """Model index -> its nearest neighbours and their distances, in units of the median distance between models.

    Args:
        chosen: indices of the models; None: all.
    """
    rows, names = space.coefficients.float(), member_names(space)
    chosen = list(range(len(rows))) if chosen is None else list(chosen)
    usual, near = _usual_distance(rows), {}
    for start in range(0, len(chosen), 512):
        block = chosen[start : start + 512]
        distances = torch.cdist(rows[block], rows)
        distances[torch.arange(len(block)), block] = math.inf
        closest = distances.topk(min(count, len(rows) - 1), dim=1, largest=False)
        for i, row, indices in zip(block, closest.values.tolist(), closest.indices.tolist(), strict=True):
            near[i] = [(names[j], d / usual) for d, j in zip(row, indices, strict=True)]
    return near


def place_of(space: Space, layout: SpaceMap, coefficients: torch.Tensor) -> torch.Tensor:
    """(2,) the position of a model (k,) on the map: among its nearest neighbours; a training model at its own."""
    rows = space.coefficients.float()
    near = _nearest_weights(torch.linalg.vector_norm(rows - _as_wide(coefficients, rows.shape[1]), dim=1))
    return near @ layout.coordinates


def at_place(space: Space, layout: SpaceMap, coefficients: torch.Tensor, place: tuple[float, float]) -> torch.Tensor:
    """A model (k,) moved to a position on the map: adds the difference between local means there and here.

    The rest of the model is kept. At its own position it is unchanged bit for bit, and the result is continuous.

    Args:
        place: x to the right and y upwards, -1 .. 1.
    """
    if not all(-1 <= v <= 1 for v in place):
        raise refuse("map_position", " ".join(f"{v:g}" for v in place), "two numbers from -1 to 1", "stay on the map")
    home, there = place_of(space, layout, coefficients), torch.tensor(place, dtype=torch.float32)
    if torch.equal(home, there):
        return coefficients.clone()
    width = max(len(coefficients), space.coefficients.shape[1])
    shift = (_local_weights(layout, there) - _local_weights(layout, home)) @ space.coefficients.float()
    return _as_wide(coefficients, width) + _as_wide(shift, width)


def _local_weights(layout: SpaceMap, place: torch.Tensor) -> torch.Tensor:
    """(N,) weights of sum 1 of the sqrt(N) nearest models on the map."""
    distances = torch.linalg.vector_norm(layout.coordinates - place, dim=1)
    count = min(len(distances), max(NEIGHBOURS, math.isqrt(len(distances))) + 1)
    radius = distances.topk(count, largest=False).values[-1].clamp_min(1e-12)
    # a local mean (Nadaraya 1964, Watson 1964) by the weights of Cleveland 1979, section 2: (1 - (d / R)^3)^3
    weights = (1 - (distances / radius).clamp(0, 1) ** 3) ** 3
    return weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))


def _as_wide(coefficients: torch.Tensor, width: int) -> torch.Tensor:
    """(width,) coefficients, truncated or padded with zeros."""
    return torch.nn.functional.pad(coefficients.float()[:width], (0, max(0, width - len(coefficients))))


def _nearest_weights(distances: torch.Tensor) -> torch.Tensor:
    """(N,) weights of sum 1 of the nearest ``NEIGHBOURS``; the first at distance 0 gets all weight."""
    radius = distances.topk(min(NEIGHBOURS + 1, len(distances)), largest=False).values[-1]
    nearest = torch.nn.functional.one_hot(distances.argmin(), len(distances)).float()
    # Franke & Nielson 1980, modified Shepard: ((R - d)+ / (R d))^2
    weights = ((radius - distances).clamp_min(0) / (radius * distances)).square()
    if distances.min() <= 1e-6 * radius or not weights.sum() > 0:
        return nearest
    return weights / weights.sum()


def _usual_distance(rows: torch.Tensor) -> float:
    """The median distance of two models, from 1,000 evenly sampled ones."""
    some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 1000)).round().long()]
    return max(float(torch.pdist(some).median()), 1e-12)


def neighbours_kept(rows: torch.Tensor, positions: torch.Tensor, count: int) -> float:
    """Mean fraction of each row's ``count`` nearest rows that are also nearest in the plane; by blocks of rows."""
    shared = 0
    for start in range(0, len(rows), 512):
        sets = []
        for points in (rows, positions):
            distances = torch.cdist(points[start : start + 512], points)
            distances[torch.arange(len(distances)), start + torch.arange(len(distances))] = math.inf
            sets.append(distances.topk(count, dim=1, largest=False).indices)
        shared += int((sets[0][:, :, None] == sets[1][:, None, :]).sum())
    return shared / (len(rows) * count)


def _components(rows: torch.Tensor) -> torch.Tensor:
    """(N, 2) the first two coefficients; with one component, a line."""
    return torch.nn.functional.pad(rows[:, :2], (0, max(0, 2 - rows.shape[1]))).clone()


def _by_neighbours(rows: torch.Tensor, start: torch.Tensor, seed: int, progress: Progress) -> torch.Tensor:
    """(N, 2) by t-SNE (van der Maaten & Hinton 2008), initialised with the first two components."""
    chances = _affinities(torch.cdist(rows, rows).double().square(), min(30.0, (len(rows) - 1) / 3)).float()
    random = torch.Generator().manual_seed(seed)
    positions = start / start.std().clamp_min(1e-12) * 1e-2 + 1e-4 * torch.randn(start.shape, generator=random)
    speed, gains, steps = torch.zeros_like(positions), torch.ones_like(positions), 400
    for step in range(steps):
        stronger, momentum = (8.0, 0.5) if step < 100 else (1.0, 0.8)  # early exaggeration, section 3.4
        kernel = 1 / (1 + torch.cdist(positions, positions).square()).fill_diagonal_(math.inf)
        # van der Maaten & Hinton 2008, Eq. 5: 4 sum_j (p_ij - q_ij)(y_i - y_j) / (1 + |y_i - y_j|^2)
        weights = (stronger * chances - kernel / kernel.sum()) * kernel
        slope = 4 * (weights.sum(1)[:, None] * positions - weights @ positions)
        gains = torch.where(slope.sign() == speed.sign(), gains * 0.8, gains + 0.2).clamp_min(0.01)
        speed = momentum * speed - max(len(rows) / 32, 10.0) * gains * slope
        positions = positions + speed
        progress(step + 1, steps)
    return positions


def _affinities(squares: torch.Tensor, perplexity: float) -> torch.Tensor:
    """(N, N) symmetric p_ij that sum to 1, each row of the given perplexity (the same paper, Eq. 1 and 2)."""
    n, target = len(squares), math.log(perplexity)
    squares = squares / squares.sum() * n * (n - 1)
    low, high = torch.full((n, 1), 1e-6, dtype=torch.float64), torch.full((n, 1), 1e6, dtype=torch.float64)
    for _ in range(60):
        beta = (low * high).sqrt()
        logits = (-beta * squares).fill_diagonal_(-math.inf)
        log_p = torch.log_softmax(logits, 1)
        p = log_p.exp()
        entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(1, keepdim=True)
        too_wide = entropy > target
        low, high = torch.where(too_wide, beta, low), torch.where(too_wide, high, beta)
    return ((p + p.T) / (2 * n)).clamp_min(1e-12)
