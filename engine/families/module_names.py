"""The names of every family's modules, by which a name in a LoRA file is read or refused.

Trainers write a module's name with underscores for its dots, and module names contain underscores too. Such a name is
looked up among the modules of the families' real classes (``modules/*.txt``), as ComfyUI looks it up among the
modules of the loaded model. It is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent / "modules"
_NUMBER = re.compile(r"(?<![^._])(?:\d+|\*)(?![^._])")
LONGEST_NAME = 512
"""Characters of a module's name; the longest of a known model has 81."""


def modules_of(name: str) -> tuple[str, ...]:
    """The module names of a family in both libraries, ``*`` for an entry of a list, from its file."""
    return tuple((_FOLDER / f"{name}.txt").read_text(encoding="utf-8").split())


class ModuleNames:
    """A lookup of module names with and without dots, linear in the length of a name.

    Args:
        modules: names, ``*`` for any number.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._spelled: dict[str, list[tuple[str, list[str]]]] = {}
        self._dotted: dict[str, list[list[str]]] = {}
        for module in dict.fromkeys(modules):
            numbers = _NUMBER.findall(module)
            self._spelled.setdefault(_shape(module).replace(".", "_"), []).append((module, numbers))
            self._dotted.setdefault(_shape(module), []).append(numbers)

    def __contains__(self, path: str) -> bool:
        """Whether a dotted name is a module's."""
        return any(_fits(known, _NUMBER.findall(path)) for known in self._dotted.get(_shape(path), ()))

    def dotted(self, name: str) -> list[str]:
        """Every dotted name of a module whose name with underscores for dots is ``name``.

        Example:
            >>> ModuleNames(["blocks.*.self_attn.q"]).dotted("blocks_3_self_attn_q")
            ['blocks.3.self_attn.q']
        """
        numbers = _NUMBER.findall(name)
        return [
            _filled(module, numbers) for module, known in self._spelled.get(_shape(name), ()) if _fits(known, numbers)
        ]


def _shape(name: str) -> str:
    return _NUMBER.sub("#", name)


def _fits(known: Collection[str], numbers: Collection[str]) -> bool:
    return all(ours in ("*", theirs) for ours, theirs in zip(known, numbers, strict=True))


def _filled(module: str, numbers: Iterable[str]) -> str:
    values = iter(numbers)
    return _NUMBER.sub(lambda match: next(values), module)


def largest_numbers(paths: Iterable[str]) -> Mapping[str, int]:
    """Name of a list of blocks -> its entries, at least, by the names of modules in a file."""
    counts: dict[str, int] = {}
    for path in paths:
        head, _, tail = path.partition(".")
        number = tail.partition(".")[0]
        if number.isdecimal() and len(number) < 6:
            counts[head] = max(counts.get(head, 0), int(number) + 1)
    return counts
