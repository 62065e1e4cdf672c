"""Reads image files, upright and in colour, and lists the images of a folder.

As in ComfyUI's *Load Image* and diffusers' ``load_image``, the EXIF orientation is applied and transparency is dropped:
a transparent pixel keeps its stored colour. Unlike there, 16-bit and floating-point images keep their depth.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import refuse
from .files import named
from .folders import files_in

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of image files, in lower case; files may have them in any case."""
_TAG = 0x0112
"""EXIF's orientation, 1 to 8."""


def open_picture(path: str | Path) -> Image:
    """An image from a file, upright: 8-bit RGB, or one 16-bit (``I;16``) or floating-point channel (``F``, 0 to 1)."""
    from PIL import Image

    with named(path, "picture", "a picture that Pillow opens", "save it again"), Image.open(path) as opened:
        return _plain(upright(opened))


def open_rgb(path: str | Path) -> Image:
    """:func:`open_picture`, with deeper images rounded to 8-bit RGB, for operations on Pillow images."""
    picture = open_picture(path)
    if picture.mode == "RGB":
        return picture
    from PIL import Image

    return Image.fromarray(np.rint(levels(picture) * 255).astype(np.uint8)).convert("RGB")


def open_with_alpha(path: str | Path) -> Image | None:
    """An image from a file, upright, as 8-bit RGBA; None if it has no alpha channel."""
    from PIL import Image

    with named(path, "picture", "a picture that Pillow opens", "save it again"), Image.open(path) as opened:
        return upright(opened).convert("RGBA") if "A" in opened.getbands() else None


def upright(picture: Image) -> Image:
    """A copy of the image, rotated by its EXIF orientation and without that entry."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def pixels_of(picture: Image) -> np.ndarray:
    """(H, W, 3) pixels: uint8, uint16 if the image has 16 bits, or float32 in [0, 1] if it is floating-point."""
    plain = _plain(upright(picture))
    if plain.mode == "RGB":
        return np.array(plain)
    return np.repeat(np.array(plain)[..., None], 3, axis=-1)


def levels(picture: Image) -> np.ndarray:
    """(H, W) float32 in [0, 1] of an image with one 16-bit or floating-point channel."""
    table = np.array(picture)
    return table if table.dtype == np.float32 else table.astype(np.float32) / 65535


def _plain(picture: Image) -> Image:
    """The image in mode ``RGB``, ``I;16`` or ``F``."""
    if picture.mode.startswith("I"):
        return _deep(np.array(picture).astype(np.int64))
    if picture.mode == "F":
        return _real(picture)
    if picture.mode in ("P", "PA", "La"):  # a palette may have transparent entries, so Pillow converts to RGBA first
        picture = picture.convert("LA" if picture.mode == "La" else "RGBA")
    return picture.convert("RGB")


def _deep(grey: np.ndarray) -> Image:
    from PIL import Image

    if grey.size and not (grey.min() >= 0 and grey.max() <= 65535):
        shown = f"a 32-bit picture of {grey.shape[1]} x {grey.shape[0]}, {grey.min()} to {grey.max()}"
        raise refuse("image values", shown, "8 or 16 bits a channel", "save it as a PNG of 8 or 16 bits")
    return Image.fromarray(grey.astype(np.uint16))


def _real(picture: Image) -> Image:
    table = np.array(picture)
    low, high = (float(table.min()), float(table.max())) if table.size else (0.0, 0.0)
    if not (low >= 0 and high <= 1):  # also where one is NaN
        shown = f"a floating-point picture of {picture.width} x {picture.height}, {low:.4g} to {high:.4g}"
        raise refuse("image values", shown, "numbers from 0 to 1", "divide them by their largest possible value")
    return picture


# --- orientation ----------------------------------------------------------------------------------------------------
class Stored(NamedTuple):
    """An image's stored size in pixels, and its EXIF orientation, 1 (upright) to 8."""

    width: int
    height: int
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def stored(path: str | Path) -> Stored:
    """Size and orientation from an image's header; pixels are not read."""
    from PIL import Image

    with named(path, "picture", "a picture that Pillow opens", "save it again"), Image.open(path) as opened:
        orientation = opened.getexif().get(_TAG, 1)
        known = isinstance(orientation, int) and 1 <= orientation <= 8
        return Stored(opened.width, opened.height, orientation if known else 1)


def turned(table: np.ndarray, orientation: int) -> np.ndarray:
    """(H, W, ...) stored pixels, rotated upright."""
    if orientation >= 5:
        table = table.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        table = table[::-1]
    return table[:, ::-1] if orientation in (2, 3, 6, 7) else table


def mask_of(path: str | Path, picture: str | Path) -> np.ndarray:
    """(H, W) values of a mask file, rotated like its image: the index, not the colour, for palettes.

    A mask with its own EXIF orientation is rotated by that. Otherwise it is taken to cover its image's stored pixels,
    unless its size shows that it is already upright.
    """
    from PIL import Image

    with named(path, "mask", "a picture that Pillow opens", "save it again"), Image.open(path) as opened:
        table, own = np.array(opened), opened.getexif().get(_TAG, 1)
    return like_picture(table, picture, own if isinstance(own, int) else 1)


def soft_mask(path: str | Path, picture: str | Path) -> Image:
    """A mask file as 8-bit grey (``L``), rotated like its image (see :func:`mask_of`)."""
    from PIL import Image

    with named(path, "mask", "a picture that Pillow opens", "save it again"), Image.open(path) as opened:
        own, plain = opened.getexif().get(_TAG, 1), _plain(opened)
        grey = np.array(plain.convert("L")) if plain.mode == "RGB" else np.rint(levels(plain) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(like_picture(grey, picture, own if isinstance(own, int) else 1)))


def like_picture(table: np.ndarray, picture: str | Path, own: int = 1) -> np.ndarray:
    """(H, W) values of a mask, rotated like its image; ``own`` is the mask's EXIF orientation (see :func:`mask_of`)."""
    if own != 1:
        return turned(table, own)
    seen = stored(picture)
    if seen.orientation >= 5 and table.shape[:2] != (seen.height, seen.width):
        return table  # already upright; callers check the size
    return turned(table, seen.orientation)


def turned_point(x: float, y: float, seen: Stored) -> tuple[float, float]:
    """The position of a stored pixel (column, row) in the upright image."""
    if seen.orientation >= 5:
        x, y = y, x
    height, width = seen.size
    x = width - 1 - x if seen.orientation in (2, 3, 6, 7) else x
    return x, height - 1 - y if seen.orientation in (3, 4, 7, 8) else y


# --- folders --------------------------------------------------------------------------------------------------------
def pictures_in(folder: str | Path, deep: bool = False) -> list[Path]:
    """Image files of a folder, sorted, without hidden ones; ``deep`` includes subfolders."""
    return files_in(folder, PICTURES, deep)
