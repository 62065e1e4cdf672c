"""Edits on the command line: 'label=number' words, and the names of files that say what was edited."""

from __future__ import annotations

from typing import Any

from ..errors import refuse


def sliders_of(texts: tuple[str, ...]) -> dict[str, float]:
    """'beard=2' .. -> label -> number."""
    return dict(map(_slider, texts))


def _slider(text: str) -> tuple[str, float]:
    label, _, number = text.partition("=")
    try:
        return label.strip(), float(number)
    except ValueError:
        raise refuse("edit", text, "label=number", "write 'beard=2'") from None


def tail_of(strengths: dict[str, float]) -> str:
    """The end of a file's name that says what was edited."""
    return "".join(f"-{k.replace(' ', '_')}{v:+g}" for k, v in strengths.items())


def example_of(space: Any) -> str:
    """A label that can be edited."""
    return next(iter(space.directions), "beard")
