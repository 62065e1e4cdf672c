"""The table of conventions in docs/python.md, written from what the tests check."""

from __future__ import annotations

import sys
from pathlib import Path

from .checks import CHECKS, cell
from .doors import DOORS

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
START, END = "<!-- conventions: written by tests/conventions -->\n", "<!-- end of conventions -->\n"


def render() -> str:
    """The table, and the reason for each refusal."""
    header = ["", *DOORS]
    rows = [[f"`{name}`" if name.isidentifier() else name, *_marks(name)] for name in CHECKS]
    table = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    meanings = [f"- **{name}**: {meaning}." for name, (_, meaning) in CHECKS.items()]
    reasons = [f"{number}. {reason}." for reason, number in _reasons().items()]
    return "\n".join([*table, "", *meanings, "", "Refused, before any work:", "", *reasons, ""])


def _marks(name: str) -> list[str]:
    numbers = _reasons()
    return [
        f"no ({numbers[_reason(title, name)]})" if cell(name, door) == "no" else cell(name, door)
        for title, door in DOORS.items()
    ]


def _reason(title: str, name: str) -> str:
    """In the words of the refusal itself."""
    door = DOORS[title]
    (argument, *_), words = door.refused[name]
    stated = getattr(sys.modules[door.kind.__module__], "MEANINGLESS", {})
    return stated[argument] if argument in stated and words not in REASONS else REASONS[words]


REASONS = {
    "distilled": "guidance is distilled into a one-step student",
    "activations come back": 'activations come back, with PIL pictures of them, or with `"none"`',
    "its strength is its coefficients'": "a model's strength is its coefficients'; it works where none is given",
}


def _reasons() -> dict[str, int]:
    reasons = [_reason(title, name) for title, door in DOORS.items() for name in CHECKS if name in door.refused]
    return {reason: number for number, reason in enumerate(dict.fromkeys(reasons), 1)}


def split(text: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = text.split(START)
    table, after = rest.split(END)
    return before + START, table, END + after


def write() -> None:
    """Put the table into the page."""
    before, _, after = split(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + render() + after, encoding="utf-8")
