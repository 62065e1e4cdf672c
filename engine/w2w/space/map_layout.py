"""Where the models of a space lie in a plane, such that neighbours in the space stay neighbours, as far as they can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ...errors import refuse
from ...runtime.progress import Progress, silent
from .delta_space import Space, member_names
from .directions import score

S = TypeVar("S", bound=Space)
METHODS = ("auto", "neighbours", "components")
LARGEST = 3000
"""Most models that ``auto`` lays out by neighbours, which takes N x N numbers."""
NEIGHBOURS = 8


@dataclass(frozen=True)
class SpaceMap:
    """A space in a plane; what a page or a widget needs to draw it.

    Attributes:
        coordinates: (N, 2) in -1 .. 1.
        method: ``neighbours`` (t-SNE) or ``components`` (the first two principal ones).
        labels: label -> (N,) score of each model, in deviations; or what a table of labels says, NaN where unknown.
        kept: share of each model's nearest ``NEIGHBOURS`` in the space that are among as many nearest in the plane.
        chance: what a random arrangement would keep.
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
    """The map in the space's file, or a new one where it has none or a method is asked for.

    Distances are between coefficients (a component counts as much as it varies).

    Args:
        labels: beside, or instead of, the space's own directions.

    Raises:
        VitrineError: If the space holds fewer than three models' coefficients, or the method is unknown.
    """
    if method not in METHODS:
        raise refuse("map", method, METHODS, "auto lays out by neighbours where it can")
    rows = space.coefficients.float()
    if len(rows) < 3:
        raise refuse("map", f"{len(rows)} models' coefficients", "three or more", "build the space from its LoRAs")
    k = rows.shape[1]
    table = {label: score(d[:k], rows) for label, d in space.directions.items()}
    stored = space.info.get("map", {}) if method == "auto" else {}
    table |= {label: torch.tensor([math.nan if v is None else v for v in column])
              for label, column in stored.get("labels", {}).items()} | dict(labels or {})  # fmt: skip
    if len(stored.get("coordinates", ())) == len(rows):
        places, used = torch.tensor(stored["coordinates"], dtype=torch.float32), str(stored["method"])
    else:
        used = method if method != "auto" else "neighbours" if len(rows) <= LARGEST else "components"
        places = _components(rows)
        if used == "neighbours":
            places = _by_neighbours(rows, places, seed, progress)
    places = places - (places.amax(0) + places.amin(0)) / 2
    places = places / places.abs().max().clamp_min(1e-12)
    count = min(NEIGHBOURS, len(rows) - 1)
    return SpaceMap(places, used, table, neighbours_kept(rows, places, count), count / (len(rows) - 1))


def with_map(space: S, drawn: SpaceMap, labels: Mapping[str, torch.Tensor] | None = None) -> S:
    """The space with its map, which its file keeps: coordinates, and labels beside the directions' scores."""
    columns = {label: [None if math.isnan(v) else round(v, 4) for v in column.tolist()]
               for label, column in (labels or {}).items()}  # fmt: skip
    rows = [[round(v, 4) for v in row] for row in drawn.coordinates.tolist()]
    stored: dict[str, Any] = {"coordinates": rows, "method": drawn.method, "labels": columns}
    return replace(space, info={**space.info, "map": stored})


def mapped(space: S, labels: Mapping[str, torch.Tensor] | None = None) -> S:
    """The space with a map of its own, kept where it has one; as it is where it holds too few models."""
    if len(space.coefficients) < 3:
        return space
    before = map_of(space)
    stored = {label: before.labels[label] for label in space.info.get("map", {}).get("labels", {})}
    return with_map(space, before, {**stored, **(labels or {})})


def neighbours_of(
    space: Space, count: int = NEIGHBOURS, chosen: Sequence[int] | None = None
) -> dict[int, list[tuple[str, float]]]:
    """Model's index -> its nearest fellows and their distances, in units of the median distance between models.

    Args:
        chosen: of which models; None: all.
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


def place_of(space: Space, drawn: SpaceMap, coefficients: torch.Tensor) -> torch.Tensor:
    """(2,) where a model (k,) stands on the map: amid its nearest fellows in the space, a training model at its own."""
    rows = space.coefficients.float()
    near = _shares(torch.linalg.vector_norm(rows - _as_wide(coefficients, rows.shape[1]), dim=1))
    return near @ drawn.coordinates


def at_place(space: Space, drawn: SpaceMap, coefficients: torch.Tensor, place: tuple[float, float]) -> torch.Tensor:
    """A model (k,) dragged to a position on the map: it takes over how people there differ from those around it.

    What is specific to the model stays. At its own position it is unchanged, bit for bit, and it never jumps.

    Args:
        place: x to the right and y upwards, -1 .. 1.

    Raises:
        VitrineError: If the position lies outside the map.
    """
    if not all(-1 <= v <= 1 for v in place):
        raise refuse("place", " ".join(f"{v:g}" for v in place), "two numbers from -1 to 1", "stay on the map")
    home, there = place_of(space, drawn, coefficients), torch.tensor(place, dtype=torch.float32)
    if torch.equal(home, there):
        return coefficients.clone()
    width = max(len(coefficients), space.coefficients.shape[1])
    shift = (_around(drawn, there) - _around(drawn, home)) @ space.coefficients.float()
    return _as_wide(coefficients, width) + _as_wide(shift, width)


def _around(drawn: SpaceMap, place: torch.Tensor) -> torch.Tensor:
    """(N,) weights of sum 1 of the sqrt(N) models that stand nearest."""
    distances = torch.linalg.vector_norm(drawn.coordinates - place, dim=1)
    count = min(len(distances), max(NEIGHBOURS, math.isqrt(len(distances))) + 1)
    radius = distances.topk(count, largest=False).values[-1].clamp_min(1e-12)
    # a local mean (Nadaraya 1964, Watson 1964) by the weights of Cleveland 1979, section 2: (1 - (d / R)^3)^3
    weights = (1 - (distances / radius).clamp(0, 1) ** 3) ** 3
    return weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))


def _as_wide(coefficients: torch.Tensor, width: int) -> torch.Tensor:
    """(width,) coefficients, cut or padded with zeros."""
    return torch.nn.functional.pad(coefficients.float()[:width], (0, max(0, width - len(coefficients))))


def _shares(distances: torch.Tensor) -> torch.Tensor:
    """(N,) weights of sum 1 of the nearest ``NEIGHBOURS``; the first at distance 0 has them all."""
    radius = distances.topk(min(NEIGHBOURS + 1, len(distances)), largest=False).values[-1]
    nearest = torch.nn.functional.one_hot(distances.argmin(), len(distances)).float()
    # Franke & Nielson 1980, modified Shepard: ((R - d)+ / (R d))^2
    weights = ((radius - distances).clamp_min(0) / (radius * distances)).square()
    if distances.min() <= 1e-6 * radius or not weights.sum() > 0:
        return nearest
    return weights / weights.sum()


def _usual_distance(rows: torch.Tensor) -> float:
    """The median distance of two models, of 1,000 spread over all."""
    some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 1000)).round().long()]
    return max(float(torch.pdist(some).median()), 1e-12)


def neighbours_kept(rows: torch.Tensor, places: torch.Tensor, count: int) -> float:
    """Mean share of each row's ``count`` nearest rows that are among its nearest places; by blocks of rows."""
    shared = 0
    for start in range(0, len(rows), 512):
        sets = []
        for points in (rows, places):
            distances = torch.cdist(points[start : start + 512], points)
            distances[torch.arange(len(distances)), start + torch.arange(len(distances))] = math.inf
            sets.append(distances.topk(count, dim=1, largest=False).indices)
        shared += int((sets[0][:, :, None] == sets[1][:, None, :]).sum())
    return shared / (len(rows) * count)


def _components(rows: torch.Tensor) -> torch.Tensor:
    """(N, 2) the first two coefficients; of one component, a line."""
    return torch.nn.functional.pad(rows[:, :2], (0, max(0, 2 - rows.shape[1]))).clone()


def _by_neighbours(rows: torch.Tensor, start: torch.Tensor, seed: int, progress: Progress) -> torch.Tensor:
    """(N, 2) by t-SNE (van der Maaten & Hinton 2008), from the first two components, so that each run is the same."""
    chances = _affinities(torch.cdist(rows, rows).double().square(), min(30.0, (len(rows) - 1) / 3)).float()
    random = torch.Generator().manual_seed(seed)
    places = start / start.std().clamp_min(1e-12) * 1e-2 + 1e-4 * torch.randn(start.shape, generator=random)
    speed, gains, steps = torch.zeros_like(places), torch.ones_like(places), 400
    for step in range(steps):
        stronger, momentum = (8.0, 0.5) if step < 100 else (1.0, 0.8)  # early exaggeration, section 3.4
        kernel = 1 / (1 + torch.cdist(places, places).square()).fill_diagonal_(math.inf)
        # van der Maaten & Hinton 2008, Eq. 5: 4 sum_j (p_ij - q_ij)(y_i - y_j) / (1 + |y_i - y_j|^2)
        weights = (stronger * chances - kernel / kernel.sum()) * kernel
        slope = 4 * (weights.sum(1)[:, None] * places - weights @ places)
        gains = torch.where(slope.sign() == speed.sign(), gains * 0.8, gains + 0.2).clamp_min(0.01)
        speed = momentum * speed - max(len(rows) / 32, 10.0) * gains * slope
        places = places + speed
        progress(step + 1, steps)
    return places


def _affinities(squares: torch.Tensor, perplexity: float) -> torch.Tensor:
    """(N, N) symmetric p_ij that sum to 1, each row of the given perplexity (the same paper, Eq. 1 and 2)."""
    n, wanted = len(squares), math.log(perplexity)
    squares = squares / squares.sum() * n * (n - 1)
    low, high = torch.full((n, 1), 1e-6, dtype=torch.float64), torch.full((n, 1), 1e6, dtype=torch.float64)
    for _ in range(60):
        beta = (low * high).sqrt()
        logits = (-beta * squares).fill_diagonal_(-math.inf)
        log_p = torch.log_softmax(logits, 1)
        p = log_p.exp()
        entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(1, keepdim=True)
        too_wide = entropy > wanted
        low, high = torch.where(too_wide, beta, low), torch.where(too_wide, high, beta)
    return ((p + p.T) / (2 * n)).clamp_min(1e-12)
