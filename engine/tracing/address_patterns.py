"""Resolves site names, globs and ``auto`` within a list of names. Needs neither a network nor torch."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from ..errors import refuse

AUTO = "auto"
"""Pattern for the network's default site."""


def matching(addresses: Sequence[str], default: str, patterns: str | Sequence[str]) -> list[str]:
    """The matching site names, each once, in their order in ``addresses``.

    Args:
        addresses: all site names of a network, in execution order.
        default: the site name that ``auto`` means.
        patterns: names or globs; a string may have several, separated by commas or spaces.

    Raises:
        VitrineError: If there is no pattern, or one matches nothing; the message has the most similar names.
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
