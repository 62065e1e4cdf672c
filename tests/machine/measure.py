"""Figures of the lane: measured by its tests, kept in ``figures.json`` when the docs are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .modes import per_step, stock_step, traffic
from .table import BUDGETS, CALL, FORWARD, OUTPUTS, STEP

FILE = Path(__file__).parent / "figures.json"
measured: dict[str, dict[str, Any]] = {}


def note(name: str, family: str, column: str, value: Any) -> None:
    """Keep a figure of this run."""
    measured.setdefault(f"{name} {family}", {})[column] = value


def known() -> dict[str, dict[str, Any]]:
    """The figures last written."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def write() -> None:
    """Put this run's figures over those written before."""
    table = known()
    for row, figures in measured.items():
        table[row] = table.get(row, {}) | figures
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def exchanged(name: str, family: str) -> tuple[float, float]:
    """Syncs and uploads of a call in the unit of its budget, less the scheduler's and the outputs' own."""
    unit = BUDGETS[name][0]
    if unit == STEP:
        # trainings and inversions have no scheduler that steps
        own = (0.0, 0.0) if name in LONE else stock_step(family)
        found = per_step(name, family)
        return max(0.0, found[0] - own[0]), max(0.0, found[1] - own[1])
    run = traffic(name, family)
    once = OUTPUTS.get(f"{name} {family}", OUTPUTS.get(name, 0))
    syncs, uploads = float(run.seen.syncs - once), float(run.seen.uploads)
    if unit == FORWARD:
        return syncs / max(1, run.forwards), uploads / max(1, run.forwards)
    assert unit == CALL
    return syncs, uploads


LONE = (
    "w2w.invert_image",
    "w2w.around.invert_image",
    "w2w.train",
    "emd.train",
    "control.train",
)
"""Calls whose steps are no sampler's."""
