"""``repr`` of results and saved files in one line: what is large is counted, not printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

LONGEST = 199
"""Characters of a ``repr``."""
_OF_A_VALUE = 40
T = TypeVar("T")


def one_line(kind: type[T]) -> type[T]:
    """Decorates a dataclass: its ``repr`` gives sizes of tensors and collections, and is at most ``LONGEST`` long."""
    kind.__repr__ = _line  # type: ignore[assignment, method-assign]
    return kind


def _line(settings: Any) -> str:
    name, shown = type(settings).__name__, ""
    for field in dataclasses.fields(settings):
        if not field.repr:
            continue
        part = f"{', ' if shown else ''}{field.name}={brief(getattr(settings, field.name))}"
        if len(name) + len(shown) + len(part) > LONGEST - len("(, ...)"):
            return f"{name}({shown}, ...)"
        shown += part
    return f"{name}({shown})"


def brief(value: object) -> str:
    """A value in at most 40 characters.

    Example:
        >>> brief({"a": 1}), brief((1, 2, 3)), brief(0.5)
        ('<1 dict>', '<3 tuple>', '0.5')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"<{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
    elif isinstance(value, Collection) and not isinstance(value, str):
        text = f"<{len(value)} {type(value).__name__}>"
    elif dataclasses.is_dataclass(value):
        text = f"<{type(value).__name__}>"
    else:
        text = repr(value)
    return text if len(text) <= _OF_A_VALUE else f"{text[: _OF_A_VALUE - 3]}..."
