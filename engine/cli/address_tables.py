"""The addresses of the shipped models as a file, so that a list of them needs neither torch nor diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[1] / "portraits" / "weights" / "addresses.json"


class AddressTable(NamedTuple):
    """The addresses of one network.

    Attributes:
        default: the address that `auto` stands for.
        rows: (address, kind, module path) in execution order.
    """

    default: str
    rows: list[tuple[str, str, str]]


def shipped_addresses(model: str) -> AddressTable | None:
    """The table of a shipped model by the name that commands take; None for any other model."""
    entry = json.loads(TABLES.read_text(encoding="utf-8")).get(model)
    return None if entry is None else AddressTable(entry["default"], [(a, k, p) for a, k, p in entry["rows"]])
