"""FIDs of several sets of prompts and noise, as arms and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..registry import Arm, Table, arms


def mean_arms(fids: Mapping[str, Sequence[float]], roles: Mapping[str, str]) -> tuple[Arm, ...]:
    """Each arm's mean over its sets."""
    return arms({name: round(sum(values) / len(values), 2) for name, values in fids.items()}, roles)


def by_set(fids: Mapping[str, Sequence[float]]) -> Table:
    """A row per arm, a column per set."""
    sets = max(map(len, fids.values()))
    rows = tuple((name, *values) for name, values in fids.items())
    return Table("FID by set", ("arm", *(f"set {k + 1}" for k in range(sets))), rows)
