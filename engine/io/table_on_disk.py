"""A table of numbers on disk, larger than memory: written by rows, read by rows or columns, resumable after a kill.

Nothing is memory-mapped, so a process uses only the memory of what it reads.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from types import TracebackType

import torch

from ..errors import refuse
from .files import named, parse_table, write_json
from .number_checks import integer

_NUMBERS, _DONE, _NOTE = "rows.bin", "done.bin", "rows.json"


class RowFile:
    """N rows of D numbers in a folder, stored in contiguous blocks of columns.

    Writing rows takes one access per block, reading a block's columns one in all. Several processes may write different
    rows at the same time. Close it, or use it in ``with``.

    Args:
        folder: created if missing; a table that exists is continued. The :class:`~vitrine.engine.jobs.run.Run` around
            it checks what its rows were computed from.
        shape: (N, D).
        width: columns per block; None is one block, for reading by rows. An existing table keeps its own.

    Attributes:
        shape, dtype: of the table.
        done: (N,) bool, which rows have been written.
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
        self._closed = weakref.finalize(self, _close, self._numbers, self._flags)
        self.done = torch.frombuffer(bytearray(self._flags.read(shape[0])), dtype=torch.uint8) == 1

    def _known(self, facts: dict) -> int | None:
        note = self.folder / _NOTE
        if not note.is_file():
            return None
        with named(note, "work folder", "a table", f"empty {self.folder.name}"):
            known = parse_table(note.read_text(encoding="utf-8"))
            width = integer(known.pop("width"), "columns per block", 1, self.shape[1])
        if known != facts:
            raise refuse("work folder", "a table of another shape", "an empty folder", f"empty {self.folder.name}")
        return width

    @property
    def inputs(self) -> Path:
        """The file of numbers, for a digest, which reads all of it."""
        return self.folder / _NUMBERS

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first column, end) of each block."""
        for start in range(0, self.shape[1], self.width):
            yield start, min(start + self.width, self.shape[1])

    def write(self, first: int, rows: torch.Tensor, good: torch.Tensor | None = None) -> None:
        """Writes rows (n, D) starting at index ``first``; they count as done once all their numbers are written.

        Args:
            good: (n,) bool, which of them are marked as done; None is all.
        """
        rows = rows.to("cpu", self.dtype)
        for start, stop in self.blocks():
            self._numbers.seek(self._at(first, start, stop))
            self._numbers.write(_bytes(rows[:, start:stop].contiguous()))
        os.fsync(self._numbers.fileno())  # before the flags, so that a power failure leaves no row marked but unwritten
        good = torch.ones(len(rows), dtype=torch.bool) if good is None else good
        self._flags.seek(first)
        self._flags.write(_bytes(good))
        self.done[first : first + len(rows)] = good

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """(n, D) rows by index."""
        rows = torch.empty(len(numbers), self.shape[1], dtype=self.dtype)
        for start, stop in self.blocks():
            for i, number in enumerate(numbers):
                self._numbers.seek(self._at(int(number), start, stop))
                _fill(self._numbers, rows[i, start:stop])
        return rows

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """(N, stop - start) columns; a whole block is read in one access."""
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
        """Byte offset of a row of the block [first, end)."""
        return (self.shape[0] * first + row * (end - first)) * self.dtype.itemsize

    def close(self) -> None:
        """Close the files; idempotent. They are closed, too, when nothing refers to the table any more."""
        self._closed()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(*files: RawIOBase) -> None:
    for file in files:
        file.close()


def _opened(path: Path, size: int):  # type: ignore[no-untyped-def]  # a raw file
    """An unbuffered file of that size for reading and writing."""
    # a link in a work folder would have another file overwritten
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise refuse("work folder", f"{path.name}, a link", "the file itself", "empty the folder") from error
    if os.path.getsize(path) < size:
        file.truncate(size)
    return file


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]  # arrays are buffers


def _fill(file, tensor: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """Read a contiguous tensor's numbers; a single read may return fewer bytes than requested."""
    target = _bytes(tensor)
    while target:
        count = file.readinto(target)
        if not count:
            raise refuse("work folder", "a truncated file", "a whole one", "empty the folder and start again")
        target = target[count:]
