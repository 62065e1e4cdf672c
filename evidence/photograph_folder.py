"""Photographed objects with masks and captions, as Debian's package ``tuxpaint-stamps-default`` installs them.

The package is GPL: its pictures are read where it puts them and never shipped. Backgrounds are crops of the five
photographs inside scikit-image, so that an object's mask does not follow from a white background.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from ..engine.errors import refuse
from ..engine.io import packages
from ..engine.io.picture_files import open_with_alpha

FOLDER = Path("/usr/share/tuxpaint/stamps")
"""Where the package installs them."""
SUBJECTS = ("animals", "food", "household", "plants", "space", "vehicles")
"""Subfolders with photographs; the others hold symbols and drawings."""
FEWEST_COLOURS = 600
"""Of the 32,768 colours of 5 bits a channel. Most drawings have fewer; a few with shading pass."""
FILL = 0.85
"""Largest side of the object, as a fraction of the picture's side."""


@dataclass(frozen=True)
class Cutout:
    """One object.

    Attributes:
        name: file name without ending; caption: its English description.
        rgba: (4, S, S) in [0, 1], the object in the middle.
    """

    name: str
    caption: str
    rgba: torch.Tensor


def available(folder: Path = FOLDER) -> bool:
    """Whether the folder has at least one of the subfolders."""
    return any((folder / subject).is_dir() for subject in SUBJECTS)


@cache
def read_cutouts(folder: Path = FOLDER, side: int = 256) -> tuple[Cutout, ...]:
    """Every photographed object of the folder, by name."""
    files = sorted(file for subject in SUBJECTS for file in (folder / subject).rglob("*.png"))
    cutouts = tuple(cutout for file in files if (cutout := _read(file, side)) is not None)
    if not cutouts:
        remedy = "install Debian's package tuxpaint-stamps-default, or give --photographs FOLDER"
        raise refuse("photographs", f"{folder} without any", f"PNG files with masks in {', '.join(SUBJECTS)}", remedy)
    return cutouts


def _read(file: Path, side: int) -> Cutout | None:
    """The object, or None for a drawing or a picture without a mask."""
    image, text = open_with_alpha(file), file.with_suffix(".txt")
    if image is None or not text.is_file():
        return None
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 4)
    opaque = pixels[pixels[..., 3] > 200][:, :3].long() >> 3
    colours = len((opaque[:, 0] * 1024 + opaque[:, 1] * 32 + opaque[:, 2]).unique())
    box = image.getchannel("A").getbbox()
    if colours < FEWEST_COLOURS or box is None:
        return None
    rgba = pixels[box[1] : box[3], box[0] : box[2]].permute(2, 0, 1)[None].float() / 255
    rgba[:, :3] *= rgba[:, 3:]  # premultiplied, so that hidden colours do not bleed in
    scale = FILL * side / max(rgba.shape[-2:])
    size = [max(1, round(length * scale)) for length in rgba.shape[-2:]]
    small = F.interpolate(rgba, size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    padded = F.pad(small, (left, side - size[1] - left, top, side - size[0] - top))
    return Cutout(file.stem, text.read_text(encoding="utf-8").splitlines()[0].strip(), padded)


def composed(rgba: torch.Tensor, seeds: range) -> torch.Tensor:
    """(B, 3, S, S) in [0, 1]: premultiplied (B, 4, S, S) objects, each before a random crop of a photograph."""
    photographs, side = whole_photographs(), rgba.shape[-1]
    crops = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        photograph = photographs[int(torch.randint(len(photographs), (), generator=g))]
        top, left = (int(torch.randint(photograph.shape[-1] - side + 1, (), generator=g)) for _ in range(2))
        crops.append(photograph[:, top : top + side, left : left + side])
    return rgba[:, :3] + (1 - rgba[:, 3:]) * torch.stack(crops)


def whole_photographs() -> torch.Tensor:
    """(5, 3, 512, 512) in [0, 1]: central squares of scikit-image's photographs."""
    try:
        from skimage import data
    except ImportError as e:
        raise refuse("scikit-image", "not installed", "its photographs", packages.install("demo")) from e
    whole = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.stereo_motorcycle()[0]]
    return torch.cat([_square(torch.from_numpy(photo.copy()).movedim(-1, 0).float() / 255) for photo in whole])


def _square(photo: torch.Tensor, side: int = 512) -> torch.Tensor:
    """(1, 3, side, side): the central square."""
    height, width = photo.shape[-2:]
    size = min(height, width)
    top, left = (height - size) // 2, (width - size) // 2
    middle = photo[None, :, top : top + size, left : left + size]
    return F.interpolate(middle, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
