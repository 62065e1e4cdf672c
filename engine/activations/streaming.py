"""Taps of any number of images and sites in bounded memory, streamed to disk in parts.

An image whose sites do not fit the budget together is tapped once per group of sites. The folder is that of an
:class:`~vitrine.engine.activations.writer.ActivationWriter`, so a killed run resumes where it stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from typing_extensions import Self

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..io.files import named, parse_json, write_json
from ..jobs.digests import digest
from ..jobs.run import Run
from ..network.condition import Condition
from ..runtime.footprint import Peak, memory_bytes
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..tracing.addresses import resolve
from ..tracing.hooks import Activation, capture
from .container import Activations
from .correspondence import feature_maps
from .ranked_pictures import MadeOf, Pictures, Source, in_chunks
from .tap import tap_latents
from .tap_config import TapConfig
from .writer import ActivationReader, ActivationWriter

_PARTS = "parts.json"
# Fractions of the budget. A shard is copied twice while it is written, and may span two parts.
_TAPPED, _WAITING, _SITES, _FORWARD = 6, 12, 4, 3


class Footprint(NamedTuple):
    """Memory of one image in bytes: at each site, in float32, and during its forward."""

    sites: dict[str, int]
    forward: int


def footprint(denoiser: Denoiser, latents: torch.Tensor, cond: Condition, config: TapConfig) -> Footprint:
    """Measures the memory of one image by one forward that keeps nothing.

    Args:
        latents: (1, C, h, w), as large as those that will be tapped.
    """
    sizes: dict[str, int] = {}

    def measure(activation: Activation) -> None:
        sizes[activation.address] = 4 * activation.tensor[:1].numel()

    sites, t = resolve(denoiser.backbone, list(config.addresses)), torch.tensor([config.timestep])
    size = (latents.shape[-2], latents.shape[-1])
    tapped = capture(denoiser.backbone, sites, reduce=measure, maps=config.maps, latent_size=size)
    with torch.no_grad(), tapped, Peak() as peak:
        denoiser.forward(latents, t.to(latents.device), cond)
    return Footprint(sizes, peak.peak)


def split_sites(sizes: Mapping[str, int], memory: int, pictures: int = 1) -> list[tuple[str, ...]]:
    """Divides sites, in order, into parts that fit the budget for ``pictures`` images."""
    largest = max(sizes, key=lambda a: sizes[a])
    if pictures * sizes[largest] > memory // _SITES:
        needed = f"{_SITES * pictures * sizes[largest] / 2**20:.0f} MiB for {largest}"
        raise refuse("memory", f"{memory / 2**20:.0f} MiB", needed, "give more, or keep fewer tokens of maps")
    parts: list[list[str]] = [[]]
    filled = 0
    for address, size in sizes.items():
        if parts[-1] and filled + pictures * size > memory // _TAPPED:
            parts.append([])
            filled = 0
        parts[-1].append(address)
        filled += pictures * size
    return [tuple(part) for part in parts]


class Streamed(NamedTuple):
    """Taps on disk. ``parts``: the sites of each part. Part p of an image is the item ``name#p``, or ``name``."""

    reader: ActivationReader
    parts: tuple[tuple[str, ...], ...]

    def key(self, name: str, part: int) -> str:
        """The key of the item with a part of an image."""
        return _key(name, part, len(self.parts))

    def read(self, names: Sequence[str], addresses: Sequence[str]) -> Activations:
        """Selected sites of selected images, as one batch; nothing else is read from disk."""
        activations: dict[str, Activation] = {}
        info = None
        for number, sites in enumerate(self.parts):
            present = [a for a in sites if a in addresses]
            if present:
                rows = [self.reader.read(self.key(name, number), present) for name in names]
                info = info or rows[0].info
                for a in present:
                    activations[a] = replace(rows[0][a], tensor=torch.cat([row[a].tensor for row in rows]))
        missing = [a for a in addresses if a not in activations]
        if missing or not names:
            shown = missing or "no pictures"
            raise refuse("address", shown, [a for part in self.parts for a in part], "tap it into another folder")
        return Activations(activations, info)


def stream_taps(
    denoiser: Denoiser,
    source: Source | Pictures,
    names: Sequence[str],
    config: TapConfig,
    folder: str | Path,
    memory: int | str = "2GB",
    progress: Progress = silent,
    workers: Workers | None = None,
) -> Streamed:
    """Taps images into a folder; the same call resumes after an interruption or a kill.

    Memory beyond the models and the forward of a single row stays below the budget. Latents are requested on demand, at
    most ``config.batch`` at a time.

    Args:
        source: gives latents and conditions of images by index. Unless it is :class:`Pictures` with ``made_of``, images
            that were tapped before are requested again, to check that they are the same.
        names: one per image, without ``#``.
        memory: budget in bytes or as "2GB".
        workers: processes that divide the images and share the folder; None taps all images.

    Returns:
        The taps of all finished images, to be read site by site.
    """
    if len(set(names)) != len(names) or not names or any("#" in name for name in names):
        raise refuse("names", list(names)[:5], "distinct names without '#'", "name every picture")
    budget, own = memory_bytes(memory), range(len(names)) if workers is None else workers.part(len(names))
    made_of = source.made_of if isinstance(source, Pictures) else None
    source = source.source if isinstance(source, Pictures) else source
    made_of = made_of or MadeOf({}, lambda n: source([n]))
    inputs = {**denoiser.inputs, **made_of.shared, "settings": replace(config, batch=1, early_exit=True)}
    run = Run(folder, "taps", inputs, ("shard-*.safetensors",), workers or ALONE)
    with run, ActivationWriter(folder, config, budget // _WAITING) as writer:
        parts, digests = _parts(Path(folder)), {n: digest(made_of.picture(n)) for n in own}
        left = [n for n in own if not parts or not _is_stored(writer, _keys(names[n], len(parts)), digests[n])]
        if left:
            row_cost, copies = footprint(denoiser, *source(left[:1]), config), 2 if config.variance else 1
            parts = parts or split_sites({a: s * copies for a, s in row_cost.sites.items()}, budget)
            write_json(Path(folder) / _PARTS, {"parts": [list(p) for p in parts]})
            chunk, limited = _together(row_cost, parts, budget, config)
        for numbers in ([left[i] for i in run] for run in in_chunks(len(left), chunk if left else 1)):
            chosen = {names[n]: digests[n] for n in numbers}
            latents, cond = source(numbers)
            for number, sites in enumerate(parts):
                keys = {_key(name, number, len(parts)): made for name, made in chosen.items()}
                if all(key in writer for key in keys):
                    continue
                taps = tap_latents(denoiser, latents, cond, replace(limited, addresses=sites))
                for row, (key, made) in enumerate(keys.items()):
                    if key not in writer:
                        writer.add(key, taps.row(row), made)
            progress(len(own) - len(left) + left.index(numbers[-1]) + 1, len(own), None)
    return read_streamed(folder)


def read_streamed(folder: str | Path) -> Streamed:
    """The taps that :func:`stream_taps` has written to a folder so far."""
    return Streamed(ActivationReader(folder), tuple(_parts(Path(folder))))


def _together(
    row_cost: Footprint, parts: Sequence[tuple[str, ...]], budget: int, config: TapConfig
) -> tuple[int, TapConfig]:
    """How many images are tapped at once, and the settings with the largest batch that fits."""
    each = max(sum(row_cost.sites[a] for a in part) for part in parts) * (2 if config.variance else 1)
    pictures = max(1, min(config.batch // len(config.seeds), budget // _TAPPED // each))
    rows = min(
        config.batch, budget // _SITES // max(row_cost.sites.values()), budget // _FORWARD // max(1, row_cost.forward)
    )
    return pictures, replace(config, batch=max(1, rows))


def _is_stored(writer: ActivationWriter, keys: Sequence[str], made_of: str) -> bool:
    """Whether all parts of an image are stored; checks that they have the same inputs."""
    return all([writer.holds(key, made_of) for key in keys])


def _key(name: str, part: int, parts: int) -> str:
    return name if parts == 1 else f"{name}#{part}"


def _keys(name: str, parts: int) -> list[str]:
    return [_key(name, part, parts) for part in range(parts)]


def _parts(folder: Path) -> list[tuple[str, ...]]:
    """How the folder's sites were divided when it was started; kept also with another budget."""
    path = folder / _PARTS
    if not path.is_file():
        return []
    with named(path, "file", "layers in parts", "use a new folder"):
        return [tuple(str(a) for a in part) for part in parse_json(path.read_text(encoding="utf-8"))["parts"]]


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
        cls,
        denoiser: Denoiser,
        pictures: Pictures,
        config: TapConfig,
        memory: int | str | None = None,
        state: str | Path | None = None,
        progress: Progress = silent,
        workers: Workers = ALONE,
    ) -> Self:
        """Taps images, divided among processes; with a budget into ``state``, or a temporary folder."""
        names = [f"{n:08d}" for n in range(pictures.count)]
        if memory is None:
            # noise depends on the seed alone, not on the number of processes
            shared = workers if pictures.count >= workers.count else ALONE
            own = shared.part(pictures.count)
            taps = tap_latents(denoiser, *pictures.source(own), config, progress)
            if shared.count > 1:
                parts = shared.gather((torch.tensor(own), {a: v.tensor for a, v in taps.items()}))
                order = torch.cat([numbers for numbers, _ in parts]).argsort()
                joined = {a: torch.cat([tensors[a] for _, tensors in parts])[order] for a in taps}
                taps = Activations({a: Activation(a, joined[a], v.grid) for a, v in taps.items()}, taps.info)
            return cls(taps, names, None)
        if workers.count > 1 and state is None:
            raise refuse("state", None, "a folder that all processes see", "activations are shared through it")
        with ExitStack() as cleaning:
            folder = state or cleaning.enter_context(tempfile.TemporaryDirectory(prefix="vitrine-taps-"))
            arguments = (denoiser, pictures, names, config, Path(folder) / "taps", memory)
            streamed = stream_taps(*arguments, progress, workers)
            if workers.count > 1:
                workers.meet()
                streamed = read_streamed(Path(folder) / "taps")
            made = cls(streamed, names, memory_bytes(memory))
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
