"""Training logs: a table in log.csv, and TensorBoard if it is installed."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..io.files import write_text

NAME = "log.csv"


class TrainLog:
    """A table row of means every ``every`` steps, without device synchronisation in between.

    A resumed run drops the table rows of steps that it repeats.

    Args:
        folder: of the run; None writes nothing (in all but the first process).
        every: steps between table rows; 0 is never.
        done: steps already done; later table rows are dropped.
    """

    def __init__(self, folder: Path | None, every: int, done: int = 0) -> None:
        self.folder, self.every = folder, every
        self._sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._board: Any = None
        self._rows = [row for row in read_log(folder) if int(row["step"]) <= done] if folder and every else []

    @property
    def on(self) -> bool:
        """Whether values are recorded."""
        return self.folder is not None and self.every > 0

    def read(self, name: str, value: torch.Tensor) -> None:
        """Record a value of this step; its mean goes into the table row."""
        if self.on:
            self._sums[name].append(value.detach().float().mean())

    def gradient(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        """Record the norm of a role's gradient."""
        if self.on:
            norms = [p.grad.detach().float().norm() for p in parameters if p.grad is not None]
            self.read(f"gradient {name}", torch.stack(norms).norm())

    def row(self, step: int, facts: dict[str, float]) -> None:
        """Called after a step: writes a table row if one is due.

        Args:
            facts: values on the host: learning rates, counters.
        """
        if not self.on or step % self.every:
            return
        means = {name: float(torch.stack(values).mean()) for name, values in sorted(self._sums.items())}
        self._sums.clear()
        row = {"step": float(step)} | means | facts
        self._rows.append({k: str(step) if k == "step" else f"{v:.6g}" for k, v in row.items()})
        self._write()
        board = self._writer()
        for name, value in row.items():
            if board is not None and name != "step":
                board.add_scalar(name, value, step)

    def pictures(self, step: int, pictures: torch.Tensor) -> None:
        """(B, 3, H, W) samples in [0, 1], for TensorBoard; the run writes them as files as well."""
        board = self._writer() if self.on else None
        if board is not None:
            board.add_images("samples", pictures, step)

    def _write(self) -> None:
        assert self.folder is not None
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(self._rows)
        write_text(self.folder / NAME, text.getvalue())

    def _writer(self) -> Any:
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._board = False
            else:
                self._board = SummaryWriter(str(self.folder))
        return self._board or None


def read_log(folder: str | Path) -> list[dict[str, str]]:
    """The table rows of a run's log.csv, oldest first; empty if there is no such file."""
    file = Path(folder) / NAME
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
