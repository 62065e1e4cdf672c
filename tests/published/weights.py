"""Where published weights are on this machine, and what was measured of them: ``figures.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vitrine_tests.published.bring import HERE, Entry, NotBroughtError, bring, cache, copied, copies, place, table

FIGURES = HERE / "figures.json"
WRITE = bool(os.environ.get("VITRINE_WRITE_DOCS"))


def entry_of(path: str) -> Entry:
    """The one whose path ends so."""
    (entry,) = (entry for entry in table() if f"{entry['repository']}/{entry['path']}".endswith(path))
    return entry


def file_of(entry: Entry) -> Path:
    """A file in the cache, brought there if need be. Skips the test unless it was asked for, or cannot be had."""
    if not os.environ.get("VITRINE_PUBLISHED"):
        pytest.skip("published weights: set VITRINE_PUBLISHED=1, or to a folder of copies")
    try:
        bring(entry, cache(), copies())
    except NotBroughtError as error:
        pytest.skip(f"{entry['path']} of {entry['repository']}: {error}")
    return place(entry, cache())


def by_hand(entry: Entry) -> bytes:
    """A file whose licence lets nobody but oneself bring it, or that is large. Skips the test where it is not."""
    local = os.environ.get("VITRINE_PUBLISHED_OTHERS")
    if not local:
        pytest.skip("files that are brought by hand: set VITRINE_PUBLISHED_OTHERS to a folder of them")
    data = copied(entry, Path(local))
    if data is None:
        pytest.skip(f"{entry['path']} of {entry['repository']} is not in VITRINE_PUBLISHED_OTHERS")
    return data


def known() -> dict[str, Any]:
    """The figures last written."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    return figures


def keep(name: str, figure: Any) -> None:
    """Write one of this run's figures, where the docs are written."""
    if WRITE:
        figures = dict(sorted((known() | {name: figure}).items()))
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
