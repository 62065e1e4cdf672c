"""Images of a ranking with their masks or keypoints, as tensors or read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from ..errors import refuse
from ..io.files import named
from ..io.folders import files_in
from ..io.picture_files import PICTURES, like_picture, mask_of, open_picture, pictures_in
from ..jobs.digests import digest
from ..network.condition import Condition
from .picture_latents import to_pixels
from .segmentation import IGNORE, square_mask

_CHECKED = 16
"""Masks that are read together."""

Source = Callable[[Sequence[int]], tuple[torch.Tensor, Condition]]
"""Indices of images -> their latents (n, C, h, w) and a condition of n rows or one."""
Masks = Callable[[Sequence[int]], torch.Tensor]
"""Indices of images -> their masks (n, H, W) of class indices, 255 for unknown pixels."""


class MadeOf(NamedTuple):
    """Inputs of taps in addition to network and settings, for a :class:`~vitrine.engine.jobs.run.Run`.

    Attributes:
        shared: name -> input that all images have in common, such as the autoencoder.
        picture: index -> file or pixels, and prompt.
    """

    shared: Mapping[str, object]
    picture: Callable[[int], object]


class Pair(NamedTuple):
    """Two images by index, (N, 2) points x, y in [0, 1] of the source, and their positions in the target."""

    source: int
    target: int
    points: torch.Tensor
    truth: torch.Tensor


def known_pairs(points: Any, count: int) -> tuple[Pair, ...]:
    """Pairs among ``count`` images: as given, or from keypoints, pairing image i with image i + count / 2.

    Args:
        points: a list of :class:`Pair`, or (B, K, 2) x, y in [0, 1] of the same K points in each, NaN if hidden.
    """
    if isinstance(points, (list, tuple)) and points and all(isinstance(p, Pair) for p in points):
        return tuple(points)
    points_of = torch.as_tensor(points, dtype=torch.float32)
    if points_of.ndim != 3 or tuple(points_of.shape[::2]) != (count, 2) or count < 2:
        accepted = f"({count}, K, 2), two pictures or more"
        raise refuse("keypoints", tuple(points_of.shape), accepted, "the same K points in each, NaN where hidden")
    pairs = []
    for n in range(count):
        other = (n + count // 2) % count
        visible = ~(points_of[n].isnan().any(1) | points_of[other].isnan().any(1))
        if bool(visible.any()):
            pairs.append(Pair(n, other, points_of[n][visible], points_of[other][visible]))
    return tuple(pairs)


@dataclass(frozen=True)
class Pictures:
    """Images by index.

    Attributes:
        count: number of images.
        source: gives latents and conditions.
        masks: gives masks; None without masks.
        pairs: pairs of images with corresponding points; None without points.
        made_of: inputs of latents and conditions, if they are known without reading these.
    """

    count: int
    source: Source
    masks: Masks | None = None
    pairs: tuple[Pair, ...] | None = None
    made_of: MadeOf | None = None

    @property
    def inputs(self) -> dict[str, object]:
        """Images and labels as inputs of a :class:`~vitrine.engine.jobs.run.Run`; reads them one by one."""
        made_of = self.made_of or MadeOf({}, lambda n: self.source([n]))
        masks = None if self.masks is None else [digest(self.masks([n])) for n in range(self.count)]
        pictures = [digest(made_of.picture(n)) for n in range(self.count)]
        return {**made_of.shared, "pictures": pictures, "masks": masks, "keypoints": self.pairs}

    def __post_init__(self) -> None:
        if self.pairs is None:
            return
        if self.masks is not None:
            raise refuse("labels", "masks and keypoints", "one of them", "rank by each, and compare")
        if not self.pairs:
            raise refuse("keypoints", "none that two pictures share", "one or more", "hidden ones do not count")
        for pair in self.pairs:
            _check_pair(pair, self.count)

    @classmethod
    def of(
        cls,
        latents: torch.Tensor,
        cond: Condition,
        masks: torch.Tensor | None = None,
        pairs: Sequence[Pair] | None = None,
    ) -> Self:
        """From clean latents (B, C, h, w), a condition of B rows or one, and masks (B, H, W) or known points."""
        if masks is not None and len(masks) != len(latents):
            raise wrong_number(len(masks), len(latents))

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            rows = torch.tensor(numbers)
            return latents[rows.to(latents.device)], cond.take(rows)

        read_masks = None if masks is None else lambda numbers: masks[list(numbers)]
        return cls(len(latents), source, read_masks, None if pairs is None else tuple(pairs))

    def classes(self) -> tuple[list[set[int]], tuple[int, int]]:
        """Classes of each image and size (H, W) of the masks; reads all masks."""
        assert self.masks is not None
        if self.count < 4:
            raise wrong_number(self.count, self.count)
        present, size = [], (0, 0)
        for run in in_chunks(self.count, _CHECKED):
            masks = self.masks(run)
            size = (int(masks.shape[-2]), int(masks.shape[-1]))
            present += [set(mask.unique().tolist()) - {IGNORE} for mask in masks]
        return present, size


def _check_pair(pair: Pair, count: int) -> None:
    for number, points in ((pair.source, pair.points), (pair.target, pair.truth)):
        if not 0 <= number < count:
            raise refuse("pairs", f"picture {number}", f"0 .. {count - 1}", "pictures count from 0")
        if points.shape != (len(pair.points), 2) or not len(points):
            shapes = (tuple(pair.points.shape), tuple(pair.truth.shape))
            raise refuse("pairs", shapes, "(N, 2) and (N, 2), N >= 1", "each point and where it went")
        if not bool(((points >= 0) & (points <= 1)).all()):
            raise refuse("keypoints", points.tolist(), "x, y in [0, 1]", "divide pixels by width and height")


def in_chunks(count: int, most: int) -> Iterator[range]:
    """``range(count)`` in consecutive chunks of at most ``most``."""
    for start in range(0, count, most):
        yield range(start, min(start + most, count))


def wrong_number(masks: int, pictures: int) -> Exception:
    """The error for a wrong number of masks."""
    counts = (masks, pictures)
    return refuse("masks, pictures", counts, "one mask per picture, four or more", "half of them validates the probes")


@dataclass(frozen=True)
class LabelledFolder:
    """Pairs of image and mask files, read one at a time.

    Attributes:
        pictures, masks: files in the same order.
        classes: number of classes.
    """

    pictures: tuple[Path, ...]
    masks: tuple[Path, ...]
    classes: int

    def __len__(self) -> int:
        return len(self.pictures)

    def mask(self, index: int, size: int | None = None) -> torch.Tensor:
        """(H, W) int64 classes of one image; ``size`` resizes to a square, nearest."""
        labels = _read_mask(self.masks[index], self.pictures[index])
        known = labels[labels != IGNORE]
        if len(known) and (int(known.min()) < 0 or int(known.max()) >= self.classes):
            strange = sorted(set(known.unique().tolist()) - set(range(self.classes)))
            accepted = f"0 .. {self.classes - 1}, or {IGNORE}"
            raise refuse(f"labels in {self.masks[index].name}", strange, accepted, "raise classes")
        return labels if size is None else square_mask(labels, size)

    def read(self, indices: Sequence[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """((B, 3, size, size) images in [-1, 1], (B, size, size) masks), both resized to a square as GDF does."""
        pictures, masks = [], []
        for index in indices:
            picture, labels = open_picture(self.pictures[index]), self.mask(index)
            if (picture.height, picture.width) != tuple(labels.shape):
                sizes = ((picture.height, picture.width), tuple(labels.shape))
                raise refuse(f"mask {self.masks[index].name}", sizes, "the picture's size", "resize it, nearest")
            pictures.append(to_pixels(picture, size, 1))
            masks.append(square_mask(labels, size))
        return torch.cat(pictures), torch.stack(masks)


def _read_mask(path: Path, picture: Path) -> torch.Tensor:
    """(H, W) int64 labels, rotated like the image: palette indices, not colours."""
    table = like_picture(_read_array(path), picture) if path.suffix == ".npy" else mask_of(path, picture)
    if table.ndim != 2 or not (np.issubdtype(table.dtype, np.integer) or (table == np.round(table)).all()):
        shown = f"{table.dtype} of shape {table.shape}"
        raise refuse(f"mask {path.name}", shown, "one channel of whole numbers", "save class numbers, not colours")
    return torch.from_numpy(table.astype(np.int64))


def _read_array(path: Path) -> np.ndarray:
    remedy = "save it with numpy.save as an integer array; objects are never unpickled"
    with named(path, "mask", "a plain array", remedy):
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: headers may claim any size
        if not isinstance(array, np.ndarray):
            raise TypeError("an archive")
        return np.array(array)


def read_masks(pictures: str | Path, masks: str | Path, classes: int) -> LabelledFolder:
    """Two folders with files of the same names; masks are PNG or .npy with class indices."""
    folder, files = Path(masks), pictures_in(Path(pictures))
    if not files:
        raise refuse("folder", str(pictures), f"pictures ({', '.join(PICTURES)})", "check the path")
    by_stem = {path.stem: path for ending in (".npy", ".png") for path in files_in(folder, ending)}
    paths = [by_stem.get(p.stem, folder / f"{p.stem}.png") for p in files]
    missing = [m.name for m in paths if not m.is_file()]
    if missing:
        shown = f"{len(missing)} of {len(paths)} are missing, e.g. {missing[0]}"
        raise refuse("masks", shown, "one for each picture", "save them under the pictures' names")
    return LabelledFolder(tuple(files), tuple(paths), classes)
