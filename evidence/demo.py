"""``vitrine demo``: one page that shows what the pack does, on the shipped model."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..engine.io.html_page import Report
from ..engine.runtime.progress import TqdmProgress
from .registry import ROOMS


def write_report(out: Path) -> Path:
    """Let each room add its section and write the page, whole or not at all. Returns the path."""
    report = Report("Vitrine", "Open a diffusion model like a display case: see inside, change it, sample from it.")
    for room in ROOMS:
        bar = TqdmProgress(room)
        importlib.import_module(f"{__package__}.{room}.page").section(report, bar)
        bar.close()
    return report.write(out)
