"""Folders of runs that were stopped: which of them stay when another begins."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ...errors import VitrineError
from ...io.ownership import sole_owner
from ...jobs.run import STATE

KEPT_STATES = 3
"""Stopped runs whose states stay beside the one that goes on."""


def drop_old_states(mine: Path, pattern: str) -> None:
    """Deletes all but the newest states of other runs beside ``mine`` that no process is at.

    Args:
        pattern: of their folders' names, as :meth:`pathlib.Path.glob` takes it.
    """
    others = [p for p in mine.parent.glob(pattern) if p != mine and (p / STATE).is_file()]
    for folder in sorted(others, key=lambda p: (p / STATE).stat().st_mtime, reverse=True)[KEPT_STATES:]:
        with suppress(VitrineError), sole_owner(folder):  # refused: another process is at it
            shutil.rmtree(folder, ignore_errors=True)
