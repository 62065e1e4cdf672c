"""Which of a list of addresses are meant by addresses, globs and ``auto``. Needs no network and no torch."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from ..errors import refuse

AUTO = "auto"
"""In place of an address: the default of a network."""


def matching(addresses: Sequence[str], default: str, patterns: str | Sequence[str]) -> list[str]:
    """The addresses that match, each once, in their own order.

    Args:
        addresses: all of a network, in execution order.
        default: what ``auto`` stands for.
        patterns: addresses or globs; a string may hold several, separated by commas or spaces.

    Raises:
        VitrineError: If there is no pattern, or one matches nothing; the message names the nearest addresses.
    """
    names = split_patterns(patterns)
    if not names:
        raise refuse("addresses", patterns, "one layer name or glob at least", f"e.g. {addresses[0]!r}")
    wanted: set[str] = set()
    for pattern in names:
        matched = [default] if pattern == AUTO else fnmatch.filter(addresses, pattern)
        if not matched:
            raise refuse("address", pattern, f"{len(addresses)} layers of this model", _hint(pattern, addresses))
        wanted.update(matched)
    return [address for address in addresses if address in wanted]


def split_patterns(patterns: str | Sequence[str]) -> list[str]:
    """Splits a string at commas, spaces and newlines; a sequence is returned as a list."""
    if isinstance(patterns, str):
        return patterns.replace(",", " ").split()
    return list(patterns)


def _hint(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return "Did you mean " + ", ".join(repr(n) for n in near) + "?"
