"""Taps of any number of pictures and places in bounded memory: what does not fit goes to disk, part by part.

A picture whose places do not fit the budget together is tapped once for each part of them. The folder is an
:class:`~vitrine.engine.activations.writer.ActivationWriter`'s, so a killed run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

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
from .ranked_pictures import MadeOf, Pictures, Source, in_chunks
from .tap import tap_latents
from .tap_config import TapConfig
from .writer import ActivationReader, ActivationWriter

_PARTS = "parts.json"
# Shares of the budget. A shard is copied twice while it is written, and may be begun by one part and ended by the next.
_TAPPED, _WAITING, _ALONE, _FORWARD = 6, 12, 4, 3


class Footprint(NamedTuple):
    """Bytes that one picture takes: at each place, in float32, and while its forward runs."""

    places: dict[str, int]
    forward: int


def footprint(denoiser: Denoiser, latents: torch.Tensor, cond: Condition, config: TapConfig) -> Footprint:
    """What one picture takes, by one forward that keeps nothing.

    Args:
        latents: (1, C, h, w), as large as those that will be tapped.
    """
    sizes: dict[str, int] = {}

    def measure(activation: Activation) -> None:
        sizes[activation.address] = 4 * activation.tensor[:1].numel()

    sites, t = resolve(denoiser.backbone, list(config.addresses)), torch.tensor([config.timestep])
    size = (latents.shape[-2], latents.shape[-1])
    tapped = capture(denoiser.backbone, sites, reduce=measure, maps=config.maps, latent_size=size)
    with torch.no_grad(), tapped, Peak() as held:
        denoiser.forward(latents, t.to(latents.device), cond)
    return Footprint(sizes, held.peak)


def split_places(sizes: Mapping[str, int], memory: int, pictures: int = 1) -> list[tuple[str, ...]]:
    """Places in their order, divided so that each part of so many pictures fits its share of the budget.

    Raises:
        VitrineError: If one place alone is too large.
    """
    largest = max(sizes, key=lambda a: sizes[a])
    if pictures * sizes[largest] > memory // _ALONE:
        needed = f"{_ALONE * pictures * sizes[largest] / 2**20:.0f} MiB for {largest}"
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
    """Taps on disk. ``parts``: the places of each part. A picture's part p is the item ``name#p``, or ``name``."""

    reader: ActivationReader
    parts: tuple[tuple[str, ...], ...]

    def key(self, name: str, part: int) -> str:
        """The item that holds a part of a picture."""
        return _key(name, part, len(self.parts))

    def read(self, names: Sequence[str], addresses: Sequence[str]) -> Activations:
        """Some places of some pictures, as one batch; nothing else is read from disk.

        Raises:
            VitrineError: If a picture or a place is not there, or a file is damaged.
        """
        activations: dict[str, Activation] = {}
        info = None
        for number, places in enumerate(self.parts):
            wanted = [a for a in places if a in addresses]
            if wanted:
                rows = [self.reader.read(self.key(name, number), wanted) for name in names]
                info = info or rows[0].info
                for a in wanted:
                    activations[a] = replace(rows[0][a], tensor=torch.cat([row[a].tensor for row in rows]))
        missing = [a for a in addresses if a not in activations]
        if missing or not names:
            shown = missing or "no pictures"
            raise refuse("address", shown, [a for part in self.parts for a in part], "tap it into another folder")
        return Activations(activations, info)


def stream_taps(
    denoiser: Denoiser, source: Source | Pictures, names: Sequence[str], config: TapConfig, folder: str | Path,
    memory: int | str = "2GB", progress: Progress = silent, workers: Workers | None = None,
) -> Streamed:  # fmt: skip
    """Tap pictures into a folder; the same call goes on after an interruption, also after ``kill -9``.

    What is held beyond the models and the forward of a single row stays below the budget, and latents are asked for
    when their turn comes, ``config.batch`` rows at most at a time.

    Args:
        source: gives latents and conditions of pictures by number. Without pictures that say what they are made of, it
            is asked for them also where they were tapped before, to see that they are the same.
        names: one for each picture, without ``#``.
        memory: budget in bytes or as "2GB".
        workers: processes that share the pictures and the folder, each of which taps its own; None taps all.

    Returns:
        The taps of all pictures whose turn has come, to be read place by place.

    Raises:
        VitrineError: If names are not distinct, one place of one picture does not fit, the folder was begun with
            another network, picture or settings, another process taps into it, and as
            :func:`~vitrine.engine.activations.tap.tap_latents`.
    """
    if len(set(names)) != len(names) or not names or any("#" in name for name in names):
        raise refuse("names", list(names)[:5], "distinct names without '#'", "name every picture")
    budget, own = memory_bytes(memory), range(len(names)) if workers is None else workers.share(len(names))
    made_of = source.made_of if isinstance(source, Pictures) else None
    source = source.source if isinstance(source, Pictures) else source
    made_of = made_of or MadeOf({}, lambda n: source([n]))
    inputs = {**denoiser.inputs, **made_of.shared, "settings": replace(config, batch=1, early_exit=True)}
    run = Run(folder, "taps", inputs, ("shard-*.safetensors",), workers or ALONE)
    with run, ActivationWriter(folder, config, budget // _WAITING) as writer:
        parts, digests = _parts(Path(folder)), {n: digest(made_of.picture(n)) for n in own}
        left = [n for n in own if not parts or not _held(writer, _keys(names[n], len(parts)), digests[n])]
        if left:
            row_cost, copies = footprint(denoiser, *source(left[:1]), config), 2 if config.variance else 1
            parts = parts or split_places({a: s * copies for a, s in row_cost.places.items()}, budget)
            write_json(Path(folder) / _PARTS, {"parts": [list(p) for p in parts]})
            chunk, limited = _together(row_cost, parts, budget, config)
        for numbers in ([left[i] for i in run] for run in in_chunks(len(left), chunk if left else 1)):
            chosen = {names[n]: digests[n] for n in numbers}
            _tap(denoiser, *source(numbers), chosen, limited, parts, writer)
            progress(len(own) - len(left) + left.index(numbers[-1]) + 1, len(own), None)
    return read_streamed(folder)


def read_streamed(folder: str | Path) -> Streamed:
    """What :func:`stream_taps` wrote to a folder so far."""
    return Streamed(ActivationReader(folder), tuple(_parts(Path(folder))))


def _together(
    row_cost: Footprint, parts: Sequence[tuple[str, ...]], budget: int, config: TapConfig
) -> tuple[int, TapConfig]:
    """How many pictures are tapped at once, and the settings with as many rows a forward as fit."""
    each = max(sum(row_cost.places[a] for a in part) for part in parts) * (2 if config.variance else 1)
    pictures = max(1, min(config.batch // len(config.seeds), budget // _TAPPED // each))
    rows = min(
        config.batch, budget // _ALONE // max(row_cost.places.values()), budget // _FORWARD // max(1, row_cost.forward)
    )
    return pictures, replace(config, batch=max(1, rows))


def _tap(
    denoiser: Denoiser, latents: torch.Tensor, cond: Condition, digests: Mapping[str, str], config: TapConfig,
    parts: Sequence[tuple[str, ...]], writer: ActivationWriter,
) -> None:  # fmt: skip
    """Pictures by name, with the digests of what they are made of, one part of the places after another."""
    for number, places in enumerate(parts):
        keys = {_key(name, number, len(parts)): made_of for name, made_of in digests.items()}
        if all(key in writer for key in keys):
            continue
        taps = tap_latents(denoiser, latents, cond, replace(config, addresses=places))
        for row, (key, made_of) in enumerate(keys.items()):
            if key not in writer:
                writer.add(key, taps.row(row), made_of)


def _held(writer: ActivationWriter, keys: Sequence[str], made_of: str) -> bool:
    """Whether all parts of a picture are there; each that is there was made of the same."""
    return all([writer.holds(key, made_of) for key in keys])


def _key(name: str, part: int, parts: int) -> str:
    return name if parts == 1 else f"{name}#{part}"


def _keys(name: str, parts: int) -> list[str]:
    return [_key(name, part, parts) for part in range(parts)]


def _parts(folder: Path) -> list[tuple[str, ...]]:
    """How the folder's places were divided when it was begun: also another budget goes on so."""
    path = folder / _PARTS
    if not path.is_file():
        return []
    with named(path, "file", "layers in parts", "use a new folder"):
        return [tuple(str(a) for a in part) for part in parse_json(path.read_text(encoding="utf-8"))["parts"]]
