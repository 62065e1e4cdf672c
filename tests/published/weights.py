"""Where published weights are on this machine, and what was measured of them: ``figures.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vitrine_tests.published.bring import HERE, Entry, NotBroughtError, bring, cache, place, right, table

FIGURES = HERE / "figures.json"
WRITE = bool(os.environ.get("VITRINE_WRITE_DOCS"))


def entry_of(path: str) -> Entry:
    """The one whose path ends so."""
    (entry,) = (entry for entry in table() if f"{entry['repository']}/{entry['path']}".endswith(path))
    return entry


def file_of(entry: Entry) -> Path:
    """A file in the cache; brought there from ``$VITRINE_PUBLISHED``, or from its repository with
    ``VITRINE_PUBLISHED_FETCH=1``. Skips the test where it is not."""
    path, local = place(entry, cache()), os.environ.get("VITRINE_PUBLISHED")
    if path.is_file() and right(entry, path.read_bytes()):
        return path
    if local or os.environ.get("VITRINE_PUBLISHED_FETCH"):
        try:
            bring(entry, cache(), Path(local) if local else None)
            return path
        except NotBroughtError as error:
            pytest.skip(f"{entry['path']} of {entry['repository']}: {error}")
    pytest.skip("published weights are not here: python tests/published/bring.py")


def known() -> dict[str, Any]:
    """The figures last written."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    return figures


def keep(name: str, figure: Any) -> None:
    """Write one of this run's figures, where the docs are written."""
    if WRITE:
        figures = dict(sorted((known() | {name: figure}).items()))
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
