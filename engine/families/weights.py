"""Names of one weight in both libraries, from a family's table of fragments."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Where a diffusers module or parameter is in ComfyUI.

    Attributes:
        name: its dotted name there.
        part: (i, n): it is the i-th of n row blocks of a fused one; None for a whole one.
        swapped: its two halves of rows are exchanged there.
    """

    name: str
    part: tuple[int, int] | None = None
    swapped: bool = False

    def rows(self, total: int, own: int) -> tuple[int, int]:
        """(start, length) of its rows among ``total``; where blocks differ in size, the first is the larger one."""
        if self.part is None:
            return 0, total
        i, n = self.part
        return (0 if i == 0 else total - (n - i) * own), own


def comfyui_place(weights: Mapping[str, str], name: str) -> Place:
    """ComfyUI's name of a diffusers module or parameter; what no fragment covers has one name in both.

    Args:
        weights: a family's table, :attr:`~vitrine.engine.families.Family.weights`.
    """
    part, swapped = None, False

    def other(match: re.Match) -> str:
        nonlocal part, swapped
        fragment, _, note = weights[match[0]].partition("|")
        if note == "swap":
            swapped = True
        elif note:
            i, n = note.split("/")
            part = int(i), int(n)
        return fragment

    found = _pattern(tuple(weights)).sub(other, name) if weights else name
    return Place(found, part, swapped)


@functools.cache
def _pattern(fragments: tuple[str, ...]) -> re.Pattern:
    longest_first = "|".join(re.escape(f) for f in sorted(fragments, key=len, reverse=True))
    return re.compile(rf"(?<![^.])(?:{longest_first})(?![^.])")
