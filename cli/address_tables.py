"""The site names of the shipped models in a file, so that listing them needs neither torch nor diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[1] / "engine" / "portraits" / "weights" / "addresses.json"


class AddressTable(NamedTuple):
    """The site names of one network.

    Attributes:
        default: the site that `auto` selects.
        rows: (site name, kind, module path) in execution order.
    """

    default: str
    rows: list[tuple[str, str, str]]


def shipped_addresses(model: str) -> AddressTable | None:
    """The table of a shipped model by its name in commands; None for other models."""
    entry = json.loads(TABLES.read_text(encoding="utf-8")).get(model)
    return None if entry is None else AddressTable(entry["default"], [(a, k, p) for a, k, p in entry["rows"]])
