"""Features of many pictures for the probes of a search: kept in memory, or read from disk as they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from typing_extensions import Self

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..progress import Progress, silent
from .config import TapConfig
from .container import Activations
from .correspondence import feature_maps
from .parallel import own_share, shared_taps
from .streaming import Streamed, in_chunks, memory_bytes, stream_taps

_READ, _CELLS = 8, 3
# Shares of the budget: joined maps of pictures read at once, of which a few copies live, and the probe's cells.


class Features:
    """Joined unit features of tapped pictures, as :func:`~.correspondence.feature_maps` makes them.

    Attributes:
        widths: place -> channels.
    """

    def __init__(self, taps: Activations | Streamed, names: Sequence[str], memory: int | None) -> None:
        self._taps, self._names, self._memory = taps, list(names), memory
        first = taps if isinstance(taps, Activations) else taps.read(names[:1], [a for p in taps.parts for a in p])
        self.widths = {a: int(v.tensor.shape[1]) for a, v in first.items()}
        self._cells = {a: int(v.tensor[0, 0].numel()) for a, v in first.items()}
        self._exit = ExitStack()

    @classmethod
    def of(
        cls, denoiser: Denoiser, latents: torch.Tensor, cond: Condition, config: TapConfig,
        memory: int | str | None = None, state: str | Path | None = None, progress: Progress = silent,
    ) -> Self:  # fmt: skip
        """Tap pictures (B, C, h, w), shared among processes; with a budget into ``state``, or a temporary folder.

        Raises:
            VitrineError: As :func:`~.streaming.stream_taps`, or if several processes have a budget and no folder.
        """
        if memory is None:
            return cls(shared_taps(denoiser, latents, cond, config, progress), range(len(latents)), None)  # type: ignore[arg-type]
        own, wait = own_share(len(latents))
        if own is not None and state is None:
            raise refuse("state", None, "a folder that all processes see", "activations are shared through it")
        with ExitStack() as cleaning:
            folder = state or cleaning.enter_context(tempfile.TemporaryDirectory(prefix="vitrine-taps-"))

            def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
                rows = torch.tensor(numbers)
                return latents[rows.to(latents.device)], cond.take(rows)

            names = [f"{n:08d}" for n in range(len(latents))]
            stream_taps(denoiser, source, names, config, Path(folder) / "taps", memory, progress, own)
            wait()
            taps = stream_taps(denoiser, source, names, config, Path(folder) / "taps", memory)
            made = cls(taps, names, memory_bytes(memory))
            made._exit = cleaning.pop_all()
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def batches(self, places: Sequence[str], rows: range) -> Iterator[tuple[range, torch.Tensor]]:
        """(numbers of pictures, their features (n, C, H, W)), in order; all at once where there is no budget."""
        most = len(rows)
        if self._memory is not None:
            most = max(1, self._memory // _READ // (4 * self._channels(places) * self._positions(places)))
        for run in in_chunks(len(rows), most):
            numbers = range(rows.start + run.start, rows.start + run.stop)
            yield numbers, feature_maps(self._read(places, numbers))

    def pixels(self, places: Sequence[str], pictures: int, most: int) -> int:
        """Labelled pixels of each picture that a probe on these places may see: ``most``, or as many as fit."""
        if self._memory is None:
            return most
        # the cells, and their normalised copy
        return max(1, min(most, self._memory // _CELLS // (2 * 4 * self._channels(places) * pictures)))

    def _channels(self, places: Sequence[str]) -> int:
        return sum(self.widths[a] for a in places)

    def _positions(self, places: Sequence[str]) -> int:
        return max(self._cells[a] for a in places)

    def _read(self, places: Sequence[str], numbers: range) -> Activations:
        if isinstance(self._taps, Streamed):
            return self._taps.read([self._names[n] for n in numbers], places)
        chosen = self._taps.select(list(places))
        if len(numbers) == chosen.rows:
            return chosen
        return chosen.rows_between(numbers.start, numbers.stop)
