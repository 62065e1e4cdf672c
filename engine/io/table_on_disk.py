"""A table of numbers on disk, larger than memory: written by rows, read by rows or by columns, resumed after a kill.

Nothing is mapped into memory, so what a process holds is what it asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from ..errors import refuse
from .files import named, parse_table, write_json

_NUMBERS, _DONE, _NOTE = "rows.bin", "done.bin", "rows.json"


class RowFile:
    """N rows of D numbers in a folder, in blocks of columns that lie together.

    Whoever writes rows needs one access a block, whoever reads a block's columns one in all. Several processes may
    write different rows at the same time. Close it, or use it in ``with``.

    Args:
        folder: made if it is missing; goes on with the table that is there. What its rows were made of is known to the
            :class:`~vitrine.engine.jobs.run.Run` around it.
        shape: (N, D).
        width: columns of a block; None is one block, for reading by rows. A table that is there keeps its own.

    Attributes:
        shape, dtype: of the table.
        done: (N,) bool, which rows were there when it was opened, or have been written since.

    Raises:
        VitrineError: If the folder holds a table of another shape.
    """

    def __init__(
        self, folder: str | Path, shape: tuple[int, int], dtype: torch.dtype = torch.float32, width: int | None = None
    ) -> None:
        self.folder, self.shape, self.dtype = Path(folder), shape, dtype
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {"shape": list(shape), "dtype": str(dtype)}
        self.width = self._known(facts) or width or shape[1]
        write_json(self.folder / _NOTE, facts | {"width": self.width})
        size = shape[0] * shape[1] * dtype.itemsize
        self._numbers, self._flags = (
            _opened(self.folder / name, n) for name, n in ((_NUMBERS, size), (_DONE, shape[0]))
        )
        self.done = torch.frombuffer(bytearray(self._flags.read(shape[0])), dtype=torch.bool).clone()

    def _known(self, facts: dict) -> int | None:
        note = self.folder / _NOTE
        if not note.is_file():
            return None
        with named(note, "work folder", "a table", f"empty {self.folder.name}"):
            known = parse_table(note.read_text(encoding="utf-8"))
            width = int(known.pop("width"))
        if known != facts:
            raise refuse("work folder", "a table of another shape", "an empty folder", f"empty {self.folder.name}")
        return width

    @property
    def inputs(self) -> Path:
        """Its numbers, for a digest: they are read whole."""
        return self.folder / _NUMBERS

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first column, end) of each block."""
        for start in range(0, self.shape[1], self.width):
            yield start, min(start + self.width, self.shape[1])

    def write(self, first: int, rows: torch.Tensor, good: torch.Tensor | None = None) -> None:
        """Rows (n, D) from number ``first`` on; they count as done once all their numbers are written.

        Args:
            good: (n,) bool, which of them become done; None is all.
        """
        rows = rows.to("cpu", self.dtype)
        for start, stop in self.blocks():
            self._numbers.seek(self._at(first, start, stop))
            self._numbers.write(_bytes(rows[:, start:stop].contiguous()))
        os.fsync(self._numbers.fileno())  # before the flags, also where the power fails
        good = torch.ones(len(rows), dtype=torch.bool) if good is None else good
        self._flags.seek(first)
        self._flags.write(_bytes(good))
        self.done[first : first + len(rows)] = good

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """(n, D) rows by number."""
        rows = torch.empty(len(numbers), self.shape[1], dtype=self.dtype)
        for start, stop in self.blocks():
            for i, number in enumerate(numbers):
                self._numbers.seek(self._at(int(number), start, stop))
                _fill(self._numbers, rows[i, start:stop])
        return rows

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """(N, stop - start) columns; those of one whole block are read in one piece."""
        columns = torch.empty(self.shape[0], stop - start, dtype=self.dtype)
        for first, end in self.blocks():
            low, high = max(first, start), min(end, stop)
            if low >= high:
                continue
            if (low, high) == (first, end) == (start, stop):
                self._numbers.seek(self._at(0, first, end))
                _fill(self._numbers, columns)
                continue
            for row in range(self.shape[0]):
                self._numbers.seek(self._at(row, first, end) + (low - first) * self.dtype.itemsize)
                _fill(self._numbers, columns[row, low - start : high - start])
        return columns

    def _at(self, row: int, first: int, end: int) -> int:
        """Where a row of the block [first, end) begins."""
        return (self.shape[0] * first + row * (end - first)) * self.dtype.itemsize

    def close(self) -> None:
        """Close the files; harmless twice."""
        self._numbers.close()
        self._flags.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path, size: int):  # type: ignore[no-untyped-def]  # a raw file
    """A file of that size for reading and writing, without a buffer of its own."""
    path.touch()
    file = open(path, "r+b", buffering=0)  # noqa: SIM115
    if os.path.getsize(path) < size:
        file.truncate(size)
    return file


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]  # arrays are buffers


def _fill(file, tensor: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """Read a contiguous tensor's numbers; one read may give fewer bytes than asked for."""
    target = _bytes(tensor)
    while target:
        count = file.readinto(target)
        if not count:
            raise refuse("work folder", "a file that was cut short", "a whole one", "empty the folder and start anew")
        target = target[count:]
