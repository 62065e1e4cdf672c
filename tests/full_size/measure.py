"""Seconds and peak memory of each run, kept in ``figures.json`` when the docs are written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrine_tests.benchmarks.conftest import peak, restart_peak

FILE = Path(__file__).parent / "figures.json"
WRITE = bool(os.environ.get("VITRINE_WRITE_DOCS"))
measured: dict[str, list[float]] = {}


@contextmanager
def measuring(door: str, name: str, family: str) -> Iterator[None]:
    """Keep what the block took: seconds, and MiB of the process at its peak, mapped files included.

    Written at once when the docs are written: a run of an hour may be stopped.
    """
    restart_peak("cpu")
    start = time.perf_counter()
    yield
    measured[f"{door} | {name} | {family}"] = [round(time.perf_counter() - start, 1), round(peak("cpu"))]
    if WRITE:
        write()


def known() -> dict[str, Any]:
    """The figures last written."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def write() -> dict[str, Any]:
    """Put this run's figures over those written before."""
    table = known() | measured
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return table
