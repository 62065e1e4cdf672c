"""Resolves site names, globs and ``auto`` within a list of names. Needs neither a network nor torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence

from ..errors import did_you_mean, refuse

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
            hint = did_you_mean(pattern, known) or _parts_like(pattern, known)
            raise refuse("address", pattern, f"{len(known)} layers of this model", hint.strip())
        wanted.update(matched)
    return [address for address in known if address in wanted]


def split_patterns(patterns: str | Sequence[str]) -> list[str]:
    """Splits a string at commas, spaces and newlines; a sequence is returned as a list."""
    if isinstance(patterns, str):
        return patterns.replace(",", " ").split()
    return list(patterns)


def _parts_like(pattern: str, names: Iterable[str]) -> str:
    """For a pattern like no name: globs for the part of a network that it may mean, else for all of its parts."""
    parts = [f"{part}-*" for part in dict.fromkeys(re.split(r"[-.\d]", name)[0] for name in names)]
    return did_you_mean(re.split(r"[-.\d*]", pattern)[0] + "-*", parts) or f"Did you mean {' or '.join(parts)}?"
