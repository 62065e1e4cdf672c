"""Which layers of a pipeline's network to tap, by labelled pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..activations.picture_latents import to_pixels
from ..activations.ranked_pictures import LabelledFolder, MadeOf, Masks, Pictures, in_chunks, known_pairs, wrong_number
from ..activations.ranking import Ranking, RankingConfig, rank_sites
from ..errors import refuse
from ..io.picture_files import open_picture
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.sizes import check_sides
from .components import UNREAD, components_of
from .conventions import masks_of

if TYPE_CHECKING:
    from .joined import TaskPipeline


_ENCODED, _SHARE = 16, 4
"""Most pictures that the VAE encodes at once, and its share of a budget."""


@torch.no_grad()
def rank_layers(
    pipe: TaskPipeline,
    images: Any,
    masks: Any = None,
    prompt: str = "",
    *,
    keypoints: Any = None,
    config: RankingConfig | None = None,
    size: int | None = None,
    value_range: Sequence[float] | None = None,
    state: str | Path | None = None,
    memory: int | str | None = None,
    progress: Progress = silent,
    workers: Workers = ALONE,
) -> Ranking:
    """Which layers to tap: filter by noise, granularity and locality, then search by labels (GDF, section 5).

    Args:
        images: at least two pictures, at least four with masks; more give steadier scores. Thousands are given as a
            :class:`~vitrine.engine.activations.ranked_pictures.LabelledFolder` with its masks, or as a list of
            paths: files are read when their turn comes.
        masks: (N, H, W) integers, 255 where unknown, or PIL pictures or arrays of them, with any number of classes;
            without masks or keypoints the filter runs alone.
        prompt: one for all pictures.
        keypoints: instead of masks (B, K, 2) x, y in [0, 1] of the same K points in each picture, NaN where hidden:
            each picture is matched with the one half of them away. Or a list of
            :class:`~vitrine.engine.activations.ranked_pictures.Pair`.
        size: files are squeezed to the model's own size where none is given.
        value_range: (0, 1) or (-1, 1) of float tensors.
        state: a folder for finished scores; the same call resumes from it.
        memory: budget in bytes or as "2GB", for thousands of pictures; see
            :func:`~vitrine.engine.activations.ranking.rank_sites`.
        workers: processes that share the pictures, from :func:`~vitrine.engine.runtime.processes.launched`.
    """
    if masks is not None and keypoints is not None:
        raise refuse("masks, keypoints", "both", "one of them", "rank by each, and compare")
    adapter = pipe._adapter
    pictures = _picture_list(images, masks, size, max(adapter.usual_size()), adapter.side_step, value_range)
    pairs = None if keypoints is None else known_pairs(keypoints, pictures.number)
    pipe._refuse_broken_weights()
    with pipe._in_use():
        first = pictures.pixels([0])
        cond, together = adapter.condition([prompt], (first.shape[-2], first.shape[-1])), _ENCODED
        if memory is not None:
            together = rows_within(memory_bytes(memory) // _SHARE, lambda: adapter.encode(first), _ENCODED)

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            runs = (pictures.pixels([numbers[i] for i in run]) for run in in_chunks(len(numbers), together))
            return torch.cat([adapter.encode(run) for run in runs]), cond

        made_of = MadeOf({**components_of(pipe, UNREAD), "prompt": prompt}, pictures.made_of)
        chosen = Pictures(pictures.number, source, pictures.masks, pairs, made_of)
        how: dict[str, Any] = {"state": state, "memory": memory, "progress": progress, "workers": workers}
        return rank_sites(pipe._denoiser(), chosen, config or RankingConfig(), **how)


class _PictureList(NamedTuple):
    """How many pictures, what gives pixels (n, 3, H, W) in [-1, 1] and masks (n, H, W) of some by number, and what the
    pixels of one are made of: its file, or themselves."""

    number: int
    pixels: Callable[[Sequence[int]], torch.Tensor]
    masks: Masks | None
    made_of: Callable[[int], object]


def _picture_list(
    images: Any, masks: Any, size: int | None, own: int, factor: int, value_range: Sequence[float] | None
) -> _PictureList:
    """Pictures in any form, a list of paths, or a folder with masks.

    Args:
        size: files are squeezed to a square of this side, others too where it is given.
        own: the model's own side, for files.
        factor: divides the sides.
    """
    check_sides("size", size)
    files = isinstance(images, (list, tuple)) and images and all(isinstance(i, (str, Path)) for i in images)
    side = size or own
    if isinstance(images, LabelledFolder):
        folder = images
        return _PictureList(
            len(folder),
            lambda numbers: to_pixels(folder.read(numbers, side)[0], None, factor, (-1.0, 1.0)),
            lambda numbers: torch.stack([folder.mask(i, side) for i in numbers]),
            lambda i: [folder.pictures[i], side],
        )
    labels = None if masks is None else torch.stack(masks_of(masks))
    read_labels = None if labels is None else lambda numbers: labels[list(numbers)]
    if files:
        count = len(images)
        pixels_of = lambda numbers: to_pixels([open_picture(images[i]) for i in numbers], side, factor)  # noqa: E731
        made_of = lambda i: [Path(images[i]), side]  # noqa: E731
    else:
        pixels = to_pixels(images, size, factor, value_range)
        count, pixels_of, made_of = len(pixels), lambda numbers: pixels[list(numbers)], lambda i: [pixels[i], side]
    if labels is not None and len(labels) != count:
        raise wrong_number(len(labels), count)
    return _PictureList(count, pixels_of, read_labels, made_of)
