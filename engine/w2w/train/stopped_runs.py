"""Removes folders of stopped runs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ...errors import VitrineError
from ...io.ownership import sole_owner
from ...jobs.run import STATE

KEPT_STATES = 3
"""Number of stopped runs whose states are kept."""


def drop_old_states(mine: Path, pattern: str) -> None:
    """Deletes all but the newest states of other runs next to ``mine`` that no process owns.

    Args:
        pattern: of their folders' names, as :meth:`pathlib.Path.glob` takes it.
    """
    others = [p for p in mine.parent.glob(pattern) if p != mine and (p / STATE).is_file()]
    for folder in sorted(others, key=lambda p: (p / STATE).stat().st_mtime, reverse=True)[KEPT_STATES:]:
        with suppress(VitrineError), sole_owner(folder):  # refused: another process owns it
            shutil.rmtree(folder, ignore_errors=True)
