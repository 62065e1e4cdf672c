"""Features of many images for the probes of a search, in memory or read from disk on demand."""

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
# Fractions of the budget: concatenated maps read at once, which exist in a few copies, and the probe's cells.


class Features:
    """Normalised, concatenated features of tapped images, see :func:`~.correspondence.feature_maps`.

    Attributes:
        widths: site name -> channels.
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
        """Taps images, divided among processes; with a budget into ``state``, or a temporary folder."""
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
        self, sites: Sequence[str], rows: Sequence[int], extra: int = 0
    ) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """(indices of images, their features (n, C, H, W)), in order; all at once without a budget.

        Args:
            extra: bytes per image that the caller needs in addition to the features.
        """
        most = len(rows)
        if self._memory is not None:
            each = 4 * self._channels(sites) * self._positions(sites) + extra
            most = max(1, self._memory // _READ // each)
        for run in in_chunks(len(rows), most):
            numbers = rows[run.start : run.stop]
            yield numbers, feature_maps(self._read(sites, numbers))

    def pixels(self, sites: Sequence[str], pictures: int, most: int) -> int:
        """Labelled pixels per image for a probe on these sites: ``most``, or as many as fit."""
        if self._memory is None:
            return most
        # the cells, and their normalised copy
        return max(1, min(most, self._memory // _CELLS // (2 * 4 * self._channels(sites) * pictures)))

    def _channels(self, sites: Sequence[str]) -> int:
        return sum(self.widths[a] for a in sites)

    def _positions(self, sites: Sequence[str]) -> int:
        return max(self._cells[a] for a in sites)

    def _read(self, sites: Sequence[str], numbers: Sequence[int]) -> Activations:
        if isinstance(self._taps, Streamed):
            return self._taps.read([self._names[n] for n in numbers], sites)
        chosen = self._taps.select(list(sites))
        return chosen if list(numbers) == list(range(chosen.rows)) else chosen.take(numbers)


def _shared_taps(
    denoiser: Denoiser, pictures: Pictures, config: TapConfig, progress: Progress, workers: Workers
) -> Activations:
    """:func:`tap_latents` in memory. Noise depends on the seed alone, not on the number of processes."""
    if pictures.count < workers.count:
        workers = ALONE
    own = workers.part(pictures.count)
    taps = tap_latents(denoiser, *pictures.source(own), config, progress)
    if workers.count == 1:
        return taps
    parts = workers.gather((torch.tensor(own), {a: v.tensor for a, v in taps.items()}))
    order = torch.cat([numbers for numbers, _ in parts]).argsort()
    joined = {a: torch.cat([tensors[a] for _, tensors in parts])[order] for a in taps}
    return Activations({a: Activation(a, joined[a], v.grid) for a, v in taps.items()}, taps.info)
