"""Labelled image folders: the layouts of ADE20K, Cityscapes and Horse-21, and a plain one for your own masks.

Every reader gives class indices from 0, and 255 for unknown pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import refuse
from ..io.files import named
from ..io.folders import files_in, folders_in
from ..io.picture_files import PICTURES, like_picture, mask_of, open_picture, pictures_in
from .picture_latents import to_pixels
from .segmentation import IGNORE, square_mask

# The 19 classes that Cityscapes evaluates, by their index in *_labelIds.png.
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


@dataclass(frozen=True)
class LabelledFolder:
    """Pairs of image and mask files, read one at a time.

    Attributes:
        pictures, masks: files in the same order.
        classes: number of classes.
        relabel: (H, W) stored labels -> int64 class indices, 255 for unknown pixels.
    """

    pictures: tuple[Path, ...]
    masks: tuple[Path, ...]
    classes: int
    relabel: Callable[[torch.Tensor], torch.Tensor]

    def __len__(self) -> int:
        return len(self.pictures)

    def mask(self, index: int, size: int | None = None) -> torch.Tensor:
        """(H, W) int64 classes of one image; ``size`` resizes to a square, nearest."""
        labels = self.relabel(_read_mask(self.masks[index], self.pictures[index]))
        known = labels[labels != IGNORE]
        if len(known) and (int(known.min()) < 0 or int(known.max()) >= self.classes):
            strange = sorted(set(known.unique().tolist()) - set(range(self.classes)))
            accepted = f"0 .. {self.classes - 1}, or {IGNORE}"
            raise refuse(f"labels in {self.masks[index].name}", strange, accepted, "choose the layout of this data set")
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


def drop_rare(masks: torch.Tensor, least: int = 20) -> torch.Tensor:
    """(B, H, W) masks in which classes with fewer than ``least`` pixels in an image become unknown (GDF, C.3)."""
    cleaned = []
    for mask in masks:
        classes, counts = mask.unique(return_counts=True)
        cleaned.append(torch.where(torch.isin(mask, classes[counts < least]), IGNORE, mask))
    return torch.stack(cleaned)


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


def read_ade20k(folder: str | Path, split: str = "validation") -> LabelledFolder:
    """ADEChallengeData2016: ``images/<split>/*.jpg``, ``annotations/<split>/*.png``; 150 classes; 0 is unknown."""
    root = Path(folder)
    pictures = _listed(root / "images" / split)
    annotations = root / "annotations" / split
    by_stem = _by_stem(annotations, ".png")
    masks = [by_stem.get(p.stem, annotations / f"{p.stem}.png") for p in pictures]
    return _folder(pictures, masks, 150, _ade_classes)


def _ade_classes(stored: torch.Tensor) -> torch.Tensor:
    return torch.where(stored == 0, IGNORE, stored - 1)


def read_cityscapes(folder: str | Path, split: str = "val") -> LabelledFolder:
    """``leftImg8bit/<split>/<city>/*_leftImg8bit.png`` with ``gtFine/.../*_gtFine_labelIds.png``; 19 classes."""
    root, ending = Path(folder), "_leftImg8bit.png"
    cities = folders_in(root / "leftImg8bit" / split)
    pictures = [p for city in cities for p in files_in(city, ending.lower())]
    fine = root / "gtFine" / split
    masks = [fine / p.parent.name / f"{p.name[: -len(ending)]}_gtFine_labelIds.png" for p in pictures]
    return _folder(pictures, masks, len(_CITYSCAPES), _city_classes, root / "leftImg8bit" / split)


def _city_classes(stored: torch.Tensor) -> torch.Tensor:
    labels = torch.full_like(stored, IGNORE)
    for new, old in enumerate(_CITYSCAPES):
        labels[stored == old] = new
    return labels


def read_horse21(folder: str | Path, split: str = "train", classes: int = 21) -> LabelledFolder:
    """DatasetDDPM's layout, ``real/<split>/`` with each image's mask as ``.npy``; also Bedroom-28."""
    pictures = _listed(Path(folder) / "real" / split)
    return _folder(pictures, [p.with_suffix(".npy") for p in pictures], classes, _as_stored)


def read_masks(pictures: str | Path, masks: str | Path, classes: int) -> LabelledFolder:
    """Two folders with files of the same names; masks are PNG or .npy with class indices."""
    files, folder = _listed(Path(pictures)), Path(masks)
    by_stem = _by_stem(folder, ".npy") | _by_stem(folder, ".png")
    return _folder(files, [by_stem.get(p.stem, folder / f"{p.stem}.png") for p in files], classes, _as_stored)


def _by_stem(folder: Path, ending: str) -> dict[str, Path]:
    return {path.stem: path for path in files_in(folder, ending)}


def _as_stored(stored: torch.Tensor) -> torch.Tensor:
    return stored


def _listed(folder: Path) -> list[Path]:
    pictures = pictures_in(folder)
    if not pictures:
        raise refuse("folder", str(folder), f"pictures ({', '.join(PICTURES)})", "give the data set's top folder")
    return pictures


def _folder(
    pictures: Sequence[Path],
    masks: Sequence[Path],
    classes: int,
    relabel: Callable[[torch.Tensor], torch.Tensor],
    where: Path | None = None,
) -> LabelledFolder:
    if not pictures:
        raise refuse("folder", str(where), "pictures of this data set", "give the data set's top folder")
    missing = [m.name for m in masks if not m.is_file()]
    if missing:
        raise refuse("masks", f"{len(missing)} of {len(masks)} are missing, e.g. {missing[0]}", "one for each picture",
                     "unpack the annotations next to the pictures")  # fmt: skip
    return LabelledFolder(tuple(pictures), tuple(masks), classes, relabel)
