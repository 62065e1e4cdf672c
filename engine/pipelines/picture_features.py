"""Features of many picture files, each tapped once into a folder, as keypoints are matched by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.correspondence import feature_maps
from ..activations.gdf_protocol import CORRESPONDENCE_SIZE, check_protocol, gdf_features
from ..activations.picture_latents import SIGNED, to_pixels
from ..activations.writer import ActivationReader, ActivationWriter
from ..errors import refuse
from ..io.picture_files import open_picture, stored
from ..jobs.digests import digest
from ..jobs.run import Run
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from ..settings.sizes import check_sides
from .activation_tap import tap_config
from .components import components_of

if TYPE_CHECKING:
    from .activation_tap import TapPipeline

Features = Callable[[str], torch.Tensor]
"""A picture's name -> its (C, h, w)."""


@dataclass(frozen=True)
class FeatureSettings(Config):
    """What is tapped, and in which size.

    Attributes:
        addresses, preset, timestep, modulate, discard, seeds: as in a call of a tap pipeline.
        size: side that pictures are squeezed to; None takes the model's own.
        keep_aspect: the longer side gets ``size``, the other follows, each rounded to whole tokens (DiTF: 640, which
            are multiples of 16 in Flux).
        protocol: "gdf" taps every picture as a separate batch and joins sites as the official code does.
        memory: budget for what is needed beyond the models.
    """

    addresses: tuple[str, ...] | None = None
    preset: str | None = None
    timestep: float | None = None
    modulate: bool = False
    discard: tuple[int, ...] = ()
    size: int | None = None
    keep_aspect: bool = False
    protocol: str = "vitrine"
    memory: int | str = "2GB"
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_sides("size", self.size)
        if check_protocol(self.protocol) and self.keep_aspect:
            raise refuse("keep_aspect", True, "False under protocol='gdf'", "the official code squeezes to squares")

    @property
    def asked(self) -> dict[str, Any]:
        """Settings of a tap that differ from a preset's."""
        chosen = {"modulate": self.modulate or None, "discard": self.discard or None}
        return {name: value for name, value in chosen.items() if value is not None}


def picture_features(
    pipe: TapPipeline,
    files: Mapping[str, Path],
    prompts: Mapping[str, str],
    folder: Path,
    settings: FeatureSettings | None = None,
    progress: Progress = silent,
) -> Features:
    """Tap files into a folder; the same call resumes where it was stopped, and reads what is there.

    Args:
        pipe: an :class:`ActivationTapPipeline` or :class:`CorrespondencePipeline` of any form.
        files: name -> picture file.
        prompts: name -> prompt.
    """
    settings = settings or FeatureSettings()
    side = settings.size or pipe.own_size()
    if settings.protocol == "gdf":
        return _by_protocol(pipe, files, prompts, folder, settings, progress)
    sites = None if settings.addresses is None else list(settings.addresses)

    def streamed(pictures: Mapping[str, Any], into: Path, **how: Any) -> Features:
        taps = pipe.stream(
            pictures, into, prompts, sites, settings.preset, timestep=settings.timestep, memory=settings.memory,
            callback=progress, seeds=settings.seeds, **settings.asked, **how,
        )  # fmt: skip
        every = [a for part in taps.parts for a in part]
        return lambda name: feature_maps(taps.read([name], every))[0]

    if not settings.keep_aspect:
        return streamed(files, folder, size=side)
    shapes = {name: _shape(file, side, pipe.side_step) for name, file in files.items()}
    by_shape = {}
    for shape in sorted(set(shapes.values())):
        own = {name: file for name, file in files.items() if shapes[name] == shape}
        into = folder / f"{shape[0]}x{shape[1]}"
        by_shape[shape] = streamed(_Resized(own, shape), into, value_range=SIGNED)
    return lambda name: by_shape[shapes[name]](name)


class _Resized(Mapping[str, torch.Tensor]):
    """Name -> (3, H, W) in [-1, 1], read and resized when its turn comes."""

    def __init__(self, files: Mapping[str, Path], shape: tuple[int, int]) -> None:
        self.files, self.shape = files, shape

    def __getitem__(self, name: str) -> torch.Tensor:
        return to_pixels(open_picture(self.files[name]), self.shape, 1)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _shape(file: Path, longer: int, step: int) -> tuple[int, int]:
    """(height, width) with the aspect ratio kept, as multiples of ``step``."""
    height, width = stored(file).size
    factor = longer / max(height, width)
    height, width = (max(1, round(side * factor / step)) * step for side in (height, width))
    return height, width


def _by_protocol(
    pipe: TapPipeline, files: Mapping[str, Path], prompts: Mapping[str, str], folder: Path, settings: FeatureSettings,
    progress: Progress,
) -> Features:  # fmt: skip
    """As GDF's code: each picture's posterior sample and noise are sampled anew from the seed."""
    from .activation_tap import ActivationTapPipeline

    tap: Any = ActivationTapPipeline.from_pipe(pipe)
    sites = None if settings.addresses is None else list(settings.addresses)
    config = tap_config(
        sites,
        settings.preset,
        settings.timestep,
        None if settings.seeds is None else list(settings.seeds),
        None,
        {"size": settings.size, **settings.asked},
    )
    inputs = {**components_of(tap), "settings": tap.as_gdf(config)}
    with (
        Run(folder, "taps by GDF's protocol", inputs, ("shard-*.safetensors",)),
        ActivationWriter(folder, tap.as_gdf(config)) as writer,
    ):
        for number, (name, file) in enumerate(files.items()):
            made_of = digest([Path(file), prompts[name]])
            if not writer.holds(name, made_of):
                taps = tap(
                    open_picture(file), prompts[name], sites, settings.preset, settings.timestep,
                    size=settings.size, seeds=settings.seeds, protocol="gdf", output_type="none", **settings.asked,
                ).activations  # fmt: skip
                writer.add(name, taps, made_of)
            progress(number + 1, len(files), None)
    reader = ActivationReader(folder)
    return lambda name: gdf_features(reader[name], CORRESPONDENCE_SIZE)[0]
