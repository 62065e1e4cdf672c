"""Tables of a LoRA's settings by layer name. PEFT's keys are regular expressions; none from a file is ever executed.

A regular expression may take exponential time. A key is therefore expanded to the names that it matches:
a dotted name, with alternatives in ``(q|v)`` or ``[12]``, an anchor at either end, and ``.*\\.`` in front.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from ...errors import refuse

_MOST, _MOST_OF_A_KEY = 100_000, 256
_PART = re.compile(r"(?P<literal>[\w-]|\\?\.|\\-)|\[(?P<characters>\w+)\]|\((?P<alternatives>[\w.\\|-]+)\)")


def names_of(key: str) -> tuple[bool, list[str]]:
    """(whether a key is anchored to a path's start, the names that it matches).

    Example:
        >>> names_of(r"attn1\\.to_(q|v)")
        (False, ['attn1.to_q', 'attn1.to_v'])
    """
    anchored = key.startswith("^")
    body = key.removeprefix("^").removesuffix("$")
    if body.startswith(r".*\."):
        anchored, body = False, body.removeprefix(r".*\.")
    options, count, at = list[list[str]](), 1, 0
    while at < len(body):
        part = _PART.match(body, at)
        if part is None:
            break
        if part["characters"]:
            options.append(list(part["characters"]))
        else:
            options.append((part["alternatives"] or part["literal"]).replace("\\", "").split("|"))
        at, count = part.end(), count * len(options[-1])
        if count > _MOST_OF_A_KEY:
            break
    if at < len(body) or count > _MOST_OF_A_KEY or not body:
        shown = key if len(key) <= 60 else f"{key[:60]}..."
        accepted = r"names of layers, with alternatives such as to_(q|v)"
        raise refuse("LoRA pattern", shown, accepted, "export the LoRA with each layer's name")
    return anchored, ["".join(parts) for parts in itertools.product(*options)]


class NameTable:
    """Values by suffix of a layer's dotted path, for PEFT's ``rank_pattern`` and ``alpha_pattern``."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._at_end: dict[str, tuple[int, Any]] = {}
        self._whole: dict[str, tuple[int, Any]] = {}
        for position, (key, value) in enumerate(table.items()):
            anchored, names = names_of(key)
            known = self._whole if anchored else self._at_end
            for name in names:
                known.setdefault(name, (position, value))
            if len(self._at_end) + len(self._whole) > _MOST:
                raise refuse("LoRA patterns", f"more than {_MOST} names", "one per layer", "export the LoRA again")

    def value(self, path: str, common: Any) -> Any:
        """The value of the first key that matches the end of ``path``, else ``common``."""
        parts = path.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        fitting = [self._at_end[end] for end in ends if end in self._at_end]
        fitting += [self._whole[path]] if path in self._whole else []
        return min(fitting, key=lambda entry: entry[0])[1] if fitting else common
