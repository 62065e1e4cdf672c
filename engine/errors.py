"""Every error has the same shape: what was given, what is accepted, what to do."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, get_args


class VitrineError(ValueError):
    """Bad input, refused before any work is done. The message has the given value, the accepted ones and a remedy.

    Whatever it quotes is in printable form, see :func:`printable`.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(readable(message))


def refuse(what: str, given: object, accepted: object, remedy: str) -> VitrineError:
    """Builds the error for the caller to raise.

    Example:
        >>> raise refuse("timestep", 1000, "0 <= t < 1000", "use 999 for pure noise")
    """
    guess = "" if remedy.startswith("Did you mean") else did_you_mean(given, _names(accepted))
    return VitrineError(f"{what}: given {_cut(readable(given))}; accepted: {_cut(readable(accepted))}. {guess}{remedy}")


def expect(value: object, kinds: Any, what: str, remedy: str) -> None:
    """Refuse an object of another class, such as the path of a file in place of what it contains.

    Args:
        kinds: a class, or a union of classes.
    """
    if not isinstance(value, kinds):
        names = " or ".join(f"a {kind.__name__}" for kind in get_args(kinds) or (kinds,))
        raise refuse(what, value if isinstance(value, str) else type(value).__name__, names, remedy)


_LONGEST_SHOWN = 2000


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """A question with the one or two names most similar to a mistyped one, or nothing.

    Example:
        >>> did_you_mean("nmo", ["vitrine", "nemo"]), did_you_mean("7", ["vitrine", "nemo"])
        ('Did you mean nemo? ', '')
    """
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), folded, n=2) if isinstance(given, str) else []
    return f"Did you mean {' or '.join(readable(folded[name]) for name in near)}? " if near else ""


def _names(accepted: object) -> list[str]:
    """The names of a list, or of a text such as "cpu, cuda:1, mps ..."; a text in words has none."""
    if isinstance(accepted, str):
        return [name for name in accepted.removesuffix(" ...").split(", ") if not re.search(r"\s", name)]
    if not isinstance(accepted, (list, tuple, set, frozenset, dict)):
        return []
    return [name for name in accepted if isinstance(name, str)]


def printable(text: str) -> str:
    """A text without what would move a terminal's cursor, colour it or turn its direction: such characters are escaped.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return "".join(c if c in JOINERS or unicodedata.category(c) not in _UNSEEN else ascii(c)[1:-1] for c in text)


JOINERS = "\u200c\u200d"
"""Invisible characters that are part of words in several scripts, and of emoji."""
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of what is no letter, mark, sign or blank."""


def readable(value: object) -> str:
    """A value as a reader who knows no Python would write it; numbers in a row keep their brackets, as shapes do.

    Example:
        >>> readable(("UNet2DConditionModel", 1280)), readable(["a", "b"]), readable((1, 4, 8, 8)), readable(None)
        ('UNet2DConditionModel, 1280', 'a, b', '(1, 4, 8, 8)', 'none')
    """
    if isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return ", ".join(f"{readable(key)} {readable(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, (tuple, list, set, frozenset)):
        numbers = value and all(isinstance(entry, (int, float)) for entry in value)
        return repr(value) if numbers else ", ".join(map(readable, value)) or "none"
    return "none" if value is None else repr(value).removeprefix("torch.")
