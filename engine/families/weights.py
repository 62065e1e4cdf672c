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
        part: n: it is the n-th block of rows of a fused one, negative ones count from its end; None for a whole one.
        swapped: its two halves of rows are exchanged there.
    """

    name: str
    part: int | None = None
    swapped: bool = False

    def rows(self, total: int, own: int) -> tuple[int, int]:
        """(start, length) of its ``own`` rows among ``total``."""
        if self.part is None:
            return 0, total
        return (self.part * own if self.part >= 0 else total + self.part * own), own


def comfyui_place(weights: Mapping[str, str], name: str) -> Place:
    """ComfyUI's name of a diffusers module or parameter; what no fragment covers has one name in both.

    Args:
        weights: a family's table, :attr:`~vitrine.engine.families.Family.weights`.
    """
    part, swapped = None, False

    def other(match: re.Match) -> str:
        nonlocal part, swapped
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", match[0])
        known = match[0] if match[0] in weights else re.sub(r"(?<=\.)\d+(?=\.)", "*", match[0])
        fragment, _, note = weights[known].partition("|")
        swapped, part = swapped or note == "swap", int(note) if note not in ("", "swap") else part
        for number in numbers if "*" in known else ():
            fragment = fragment.replace("*", number, 1)
        return fragment

    found = _pattern(tuple(weights)).sub(other, name) if weights else name
    return Place(found, part, swapped)


@functools.cache
def _pattern(fragments: tuple[str, ...]) -> re.Pattern:
    longest_first = "|".join(re.escape(f).replace(r"\*", r"\d+") for f in sorted(fragments, key=len, reverse=True))
    return re.compile(rf"(?<![^.])(?:{longest_first})(?![^.])")
