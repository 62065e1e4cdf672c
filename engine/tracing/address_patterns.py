"""Which of a list of addresses are meant by addresses, globs and ``auto``. Needs no network and no torch."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Sequence

from ..errors import refuse

AUTO = "auto"
"""In place of an address: the default of a network."""


_GLOB = re.compile(r"[*?\[]")


def matching(addresses: Collection[str], default: str, patterns: str | Sequence[str]) -> list[str]:
    """The addresses that match, each once, in their own order.

    Args:
        addresses: all of a network, in execution order. A whole address is looked up, a glob is compared with each.
        default: what ``auto`` stands for.
        patterns: addresses or globs; a string may hold several, separated by commas or spaces.

    Raises:
        VitrineError: If there is no pattern, or one matches nothing; the message names the nearest addresses.
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
