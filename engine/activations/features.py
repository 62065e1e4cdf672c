"""Features of many pictures for the probes of a search: kept in memory, or read from disk as they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from typing_extensions import Self

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..runtime.footprint import memory_bytes
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..tracing.hooks import Activation
from .container import Activations
from .correspondence import feature_maps
from .ranked_pictures import Pictures, in_chunks
from .streaming import Streamed, read_streamed, stream_taps
from .tap import tap_latents
from .tap_config import TapConfig

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
        cls, denoiser: Denoiser, pictures: Pictures, config: TapConfig, memory: int | str | None = None,
        state: str | Path | None = None, progress: Progress = silent, workers: Workers = ALONE,
    ) -> Self:  # fmt: skip
        """Tap pictures, shared among processes; with a budget into ``state``, or a temporary folder.

        Raises:
            VitrineError: As :func:`~.streaming.stream_taps`, or if several processes have a budget and no folder.
        """
        names = [f"{n:08d}" for n in range(pictures.count)]
        if memory is None:
            return cls(_shared_taps(denoiser, pictures, config, progress, workers), names, None)
        if workers.count > 1 and state is None:
            raise refuse("state", None, "a folder that all processes see", "activations are shared through it")
        with ExitStack() as cleaning:
            folder = state or cleaning.enter_context(tempfile.TemporaryDirectory(prefix="vitrine-taps-"))
            arguments = (denoiser, pictures, names, config, Path(folder) / "taps", memory)
            taps = stream_taps(*arguments, progress, workers)
            if workers.count > 1:
                workers.meet()
                taps = read_streamed(Path(folder) / "taps")
            made = cls(taps, names, memory_bytes(memory))
            made._exit = cleaning.pop_all()
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def batches(
        self, places: Sequence[str], rows: Sequence[int], beside: int = 0
    ) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """(numbers of pictures, their features (n, C, H, W)), in order; all at once where there is no budget.

        Args:
            beside: bytes that the caller holds for each picture beside its features.
        """
        most = len(rows)
        if self._memory is not None:
            each = 4 * self._channels(places) * self._positions(places) + beside
            most = max(1, self._memory // _READ // each)
        for run in in_chunks(len(rows), most):
            numbers = rows[run.start : run.stop]
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

    def _read(self, places: Sequence[str], numbers: Sequence[int]) -> Activations:
        if isinstance(self._taps, Streamed):
            return self._taps.read([self._names[n] for n in numbers], places)
        chosen = self._taps.select(list(places))
        return chosen if list(numbers) == list(range(chosen.rows)) else chosen.take(numbers)


def _shared_taps(
    denoiser: Denoiser, pictures: Pictures, config: TapConfig, progress: Progress, workers: Workers
) -> Activations:
    """:func:`tap_latents` in memory. Noise depends on the seed alone, so any number of processes gives the same."""
    if pictures.count < workers.count:
        workers = ALONE
    own = workers.share(pictures.count)
    taps = tap_latents(denoiser, *pictures.source(own), config, progress)
    if workers.count == 1:
        return taps
    shares = workers.gather((torch.tensor(own), {a: v.tensor for a, v in taps.items()}))
    order = torch.cat([numbers for numbers, _ in shares]).argsort()
    joined = {a: torch.cat([tensors[a] for _, tensors in shares])[order] for a in taps}
    return Activations({a: Activation(a, joined[a], v.grid) for a, v in taps.items()}, taps.info)
