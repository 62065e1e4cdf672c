"""Pictures and masks of a ranking: at hand, or as files that are read when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..activations.labelled import LabelledFolder
from ..activations.picture_latents import to_pixels
from ..activations.ranked_pictures import Masks, wrong_number
from ..errors import refuse
from ..io.picture_files import open_picture
from ..settings.sizes import check_sides
from .conventions import masks_of


class PictureList(NamedTuple):
    """How many pictures, what gives pixels (n, 3, H, W) in [-1, 1] and masks (n, H, W) of some by number, and what the
    pixels of one are made of: its file, or themselves."""

    number: int
    pixels: Callable[[Sequence[int]], torch.Tensor]
    masks: Masks | None
    made_of: Callable[[int], object]


def picture_list(
    images: Any, masks: Any, size: int | None, own: int | None, factor: int, value_range: Sequence[float] | None
) -> PictureList:
    """Pictures in any form, a list of paths, or a folder with masks.

    Args:
        size: files are squeezed to a square of this side, others too where it is given.
        own: the model's own side, for files; None where it is unknown.
        factor: divides the sides.
    """
    check_sides("size", size)
    files = isinstance(images, (list, tuple)) and images and all(isinstance(i, (str, Path)) for i in images)
    side = size or own or 0
    if not side and (files or isinstance(images, LabelledFolder)):
        raise refuse("size", None, "a side in pixels", "this model has no usual size")
    if isinstance(images, LabelledFolder):
        folder = images
        return PictureList(
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
    return PictureList(count, pixels_of, read_labels, made_of)
