"""``vitrine demo``: one page that shows what the pack does, on the shipped model."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from ..claims import ROOMS
from ..progress import TqdmProgress
from .report import Report


def write_report(out: Path) -> Path:
    """Let each room add its section and write the page, whole or not at all. Returns the path."""
    report = Report("Vitrine", "Open a diffusion model like a display case: see inside, change it, sample from it.")
    package = (__package__ or "vitrine.engine.cli").rsplit(".", 1)[0]
    for room in ROOMS:
        module = f"{package}.{room}.report"
        if importlib.util.find_spec(f"{package}.{room}") and importlib.util.find_spec(module):
            bar = TqdmProgress(room)
            importlib.import_module(module).section(report, bar)
            bar.close()
    return report.write(out)
