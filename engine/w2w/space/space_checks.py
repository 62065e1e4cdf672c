"""Checks of space and model files, read or about to be written, so that later steps cannot fail or produce NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import printable, refuse

LARGEST = 1e9
"""Largest number in a space: real singular values are below a million."""
_LEAST = 1e-15
"""Smallest singular value: the square of a smaller one underflows in float32."""
_TEXTS = ("base", "reason", "source", "licence", "note")
MOST_MODELS = (1 << 31) - 1


def check_numbers(tensors: Mapping[str, torch.Tensor], most: float = LARGEST) -> None:
    """Checks that numbers are finite and small enough for finite products.

    Raises:
        ValueError: If one is not; the message has the tensor's name.
    """
    for name, tensor in tensors.items():
        low, high = tensor.aminmax() if tensor.numel() else (tensor, tensor)
        largest = max(-float(low), float(high)) if tensor.numel() else 0.0
        if not largest <= most:
            raise ValueError(f"{printable(name)} with numbers of up to {largest:.3g}")


def check_components(count: int | None) -> None:
    """Checks how many components are asked for; None is the usual number."""
    if count is not None and count < 1:
        raise refuse("components", count, "1 or more", "leave it out for the usual number")


def check_names(names: Sequence[Any], models: int) -> tuple[str, ...]:
    """The names of a space's models: one text per model, or none.

    Raises:
        ValueError: If they are anything else, or contain control characters.
    """
    if not isinstance(names, (list, tuple)) or len(names) not in (0, models):
        raise ValueError(f"{len(names) if isinstance(names, list) else 'no list of'} names of {models} models")
    for name in names:
        check_text(name, "a model's name")
    return tuple(names)


def check_directions(directions: Mapping[str, torch.Tensor], singular_values: torch.Tensor) -> None:
    """Checks that each direction has a name, a number per component, and variance along it.

    Raises:
        ValueError: If one does not.
    """
    for label, direction in directions.items():
        check_text(label, "a label")
        spread = singular_values if bool(singular_values.any()) else torch.ones_like(singular_values)
        if direction.shape != spread.shape or not float((direction * spread).norm()) > _LEAST:
            raise ValueError(
                f"direction {label} {tuple(direction.shape)}, for {len(spread)} components, or no direction"
            )


def check_spread(singular_values: torch.Tensor, variance: float, models: int) -> None:
    """Checks singular values (K,), the total variance and the number of models.

    Raises:
        ValueError: If one is negative or almost zero, or there are fewer than two models.
    """
    known = singular_values[singular_values != 0]  # a published space has unknown components
    if not len(singular_values) or bool((known < _LEAST).any()):
        raise ValueError(f"singular values below {_LEAST}, or none")
    if not 0 <= variance <= LARGEST * LARGEST or not 2 <= models <= MOST_MODELS:
        raise ValueError(f"total variance {variance} of {models} models")


def check_info(info: Mapping[str, Any], dimension: int, models: int) -> None:
    """Checks the parts of a space file's metadata that are read here.

    Raises:
        ValueError: If an entry has another type or shape.
    """
    for name in _TEXTS:
        if name in info:
            check_text(info[name], name, 10_000)
    for label in _list(info.get("retired", []), "retired"):
        check_text(label, "a retired label")
    for label, strength in _table(info.get("pair_sliders", {}), "pair_sliders").items():
        _number(strength, f"pair slider {label}")
    centre = _list(info.get("centre", [0.0]), "centre")
    if len(centre) > dimension:
        raise ValueError(f"centre of {len(centre)} numbers, for {dimension} components")
    for value in centre:
        _number(value, "centre")
    _check_map(_table(info.get("map", {}), "map"), models)


def _check_map(layout: Mapping[str, Any], models: int) -> None:
    if not layout:
        return
    rows = _list(layout.get("coordinates"), "map")
    if len(rows) not in (0, models) or any(len(_list(row, "map")) != 2 for row in rows):
        raise ValueError(f"map of {len(rows)} positions, of {models} models")
    for value in (v for row in rows for v in row):
        _number(value, "map")
    check_text(layout.get("method"), "the map's method")
    for label, column in _table(layout.get("labels", {}), "map labels").items():
        check_text(label, "a label of the map")
        if len(_list(column, "map labels")) != models:
            raise ValueError(f"map label {label} of {len(column)} models, not {models}")
        for value in column:
            _number(0.0 if value is None else value, f"map label {label}")


def check_history(history: Any) -> tuple[Mapping[str, Any], ...]:
    """The checked history of a model; the start of the last step is a timestep.

    Raises:
        ValueError: If they are anything else.
    """
    for step in _list(history, "history"):
        start = _number(_table(step, "history").get("start", 1000.0), "start")
        if not -1 <= start <= 1000:
            raise ValueError(f"a step that starts at {start}")
    return tuple(history)


def check_text(value: Any, what: str, longest: int = 1000) -> None:
    """Checks that a value is a text without control characters.

    Raises:
        ValueError: If it is not.
    """
    plain = value.replace("\n", "") if isinstance(value, str) else ""
    if not isinstance(value, str) or len(value) > longest or printable(plain) != plain:
        raise ValueError(f"{what} that is not plain text: {str(value)[:60]!r}")


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{what}: {str(value)[:60]!r} is not a finite number")
    return float(value)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, not a {type(value).__name__}")
    return value


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected a table, not a {type(value).__name__}")
    return value
