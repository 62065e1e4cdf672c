"""Resolves site names, globs and ``auto`` within a list of names. Needs neither a network nor torch."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Sequence

from ..errors import refuse

AUTO = "auto"
"""Pattern for the network's default site."""


_GLOB = re.compile(r"[*?\[]")


def matching(addresses: Collection[str], default: str, patterns: str | Sequence[str]) -> list[str]:
    """The matching site names, each once, in their order in ``addresses``.

    Args:
        addresses: all site names of a network, in execution order. Full names are looked up; a glob is compared with
            each.
        default: the site name that ``auto`` means.
        patterns: names or globs; a string may have several, separated by commas or spaces.

    Raises:
        VitrineError: If there is no pattern, or one matches nothing; the message has the most similar names.
    """
    names, known = split_patterns(patterns), dict.fromkeys(addresses)
    if not names:
        raise refuse("addresses", patterns, "one layer name or glob at least", f"e.g. {next(iter(known))!r}")
    wanted: set[str] = set()
    for pattern in dict.fromkeys(names):
        if pattern == AUTO:
            matched = [default]
        elif pattern in known:
            matched = [pattern]
        else:
            matched = fnmatch.filter(known, pattern) if _GLOB.search(pattern) else []
        if not matched:
            raise refuse("address", pattern, f"{len(known)} layers of this model", _hint(pattern, list(known)))
        wanted.update(matched)
    return [address for address in known if address in wanted]


def split_patterns(patterns: str | Sequence[str]) -> list[str]:
    """Splits a string at commas, spaces and newlines; a sequence is returned as a list."""
    if isinstance(patterns, str):
        return patterns.replace(",", " ").split()
    return list(patterns)


def _hint(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return "Did you mean " + ", ".join(repr(n) for n in near) + "?"
