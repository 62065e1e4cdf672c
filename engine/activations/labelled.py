"""A folder of pictures with a folder of their masks: class indices from 0, and 255 for unknown pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import refuse
from ..io.files import named
from ..io.folders import files_in
from ..io.picture_files import PICTURES, like_picture, mask_of, open_picture, pictures_in
from .picture_latents import to_pixels
from .segmentation import IGNORE, square_mask


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
