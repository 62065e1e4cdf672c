"""Training pictures, and which of them a sample is nearest to: by how much, and where.

Pictures are compared by their pixels at 64 px, measured against what is usual. A sample is a copy where its distance is
below a third of the usual one (Gu et al. 2023, arXiv 2310.02664); the same rule, place by place, says which part of it
is. Altered copies are looked for too, see :mod:`.altered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..activations.picture_latents import to_pixels
from ..errors import refuse
from ..io.picture_files import PICTURES, open_picture, pictures_in
from ..io.table_on_disk import RowFile
from ..io.tables import read_text
from ..jobs.digests import digest
from ..nemo.blocked_copies import SIDE, THIRD
from ..nemo.ssim import betas_for, blur, ms_ssim
from ..runtime.finite import require_finite
from .altered import KINDS, UNALTERED, AlteredIndex

if TYPE_CHECKING:
    from PIL.Image import Image

LENGTH = 3 * SIDE * SIDE
"""Numbers of a thumbnail."""
_MARGIN = 5
"""Of the window that compares two pictures position by position."""
_PLAIN = 0.02
"""Usual distance below which a position tells nothing."""
_EQUAL = 0.01
"""Distance of two thumbnails of one picture, saved twice."""


@dataclass(frozen=True)
class Pictures:
    """Training pictures, read when their turn comes.

    Attributes:
        names: one for each.
        read: number -> (3, H, W) in [0, 1].
        content: what they are, such as their files, for the identity of a job; None: they are all read for it.
    """

    names: Sequence[str] = ()
    read: Callable[[int], torch.Tensor] | None = None
    content: object = None

    @property
    def inputs(self) -> list[object]:
        """Names and contents."""
        if self.content is not None or self.read is None:
            return [list(self.names), self.content]
        return [list(self.names), [digest(self.read(i)) for i in range(len(self.names))]]

    def cropped(self, size: Sequence[int]) -> Pictures:
        """The same, cropped around their middle to the proportions of (height, width), as trainers do."""
        read = self.read
        return self if read is None else replace(self, read=lambda number: _cropped(read(number), size))

    def table(self, folder: Path, after: Callable[[], None] | None = None) -> AbstractContextManager[RowFile | None]:
        """Their thumbnails in a folder, those that are missing made now; None without pictures.

        Args:
            after: called after each picture that was read.
        """
        if not self.names or self.read is None:
            return nullcontext()
        table = RowFile(folder, (len(self.names), LENGTH), torch.float16)
        for i in (~table.done).nonzero()[:, 0].tolist():
            table.write(i, thumbnails(self.read(i)[None]).flatten(1))
            if after is not None:
                after()
        return table


def pictures_of(folder: str | Path) -> tuple[Pictures, list[Path]]:
    """Training pictures of a folder, in the order of their names, and their files."""
    paths = pictures_in(folder)
    if not paths:
        raise refuse("pictures", Path(folder).name, f"a folder with {', '.join(PICTURES)}", "check the path")

    def read(number: int) -> torch.Tensor:
        pixels: torch.Tensor = to_pixels(open_picture(paths[number]), None, 1)
        return (pixels[0] + 1) / 2

    return Pictures([path.name for path in paths], read, paths), paths


def captions_beside(paths: Sequence[Path]) -> list[str]:
    """Of the text file of the same name next to each picture, as trainers read it; none where one lacks."""
    captions = []
    for path in paths:
        files = [path.with_suffix(ending) for ending in (".txt", ".caption")]
        captions += [" ".join(read_text(file).split()) for file in files if file.is_file()][:1]
    return captions if len(captions) == len(paths) else []


def _cropped(picture: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """(3, H, W) around its middle."""
    sides = picture.shape[-2:]
    scale = min(sides[0] / size[0], sides[1] / size[1])
    height, width = (min(side, round(scale * wanted)) for side, wanted in zip(sides, size, strict=True))
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    return picture[..., top : top + height, left : left + width]


def as_image(picture: torch.Tensor) -> Image:
    """(3, H, W) in [0, 1] for Pillow."""
    from PIL import Image

    return Image.fromarray((picture.clamp(0, 1).movedim(0, -1) * 255).round().byte().numpy())


def thumbnails(pictures: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in [0, 1] -> (B, 3, 64, 64), float32 on the CPU, by averages of areas."""
    small = F.interpolate(pictures.float().cpu(), (SIDE, SIDE), mode="area")
    require_finite(small, "pictures")
    return small


def distances(samples: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """(S, P) root mean square over pixels and colours of thumbnails (S, 3, 64, 64) and (P, 3, 64, 64)."""
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(samples.flatten(1), pictures.flatten(1), compute_mode=exact) / LENGTH**0.5


@dataclass(frozen=True)
class Nearest:
    """For each of S samples of one prompt, the picture it is nearest to.

    Attributes:
        ratios: (S,) its distance as a share of the usual one; below a third it is a copy. Of an altered copy, that of
            the altered picture.
        numbers: (S,) which picture, or which other sample of the prompt.
        areas: (S,) 0..1, the share of the picture where it is one.
        similar: (S,) 0..1, MS-SSIM of the two at 64 px.
        maps: (S, 64, 64) the ratio at each position.
        kinds: (S,) index into :data:`.altered.KINDS`: how the picture was altered.
    """

    ratios: torch.Tensor
    numbers: torch.Tensor
    areas: torch.Tensor
    similar: torch.Tensor
    maps: torch.Tensor
    kinds: torch.Tensor

    @property
    def copied(self) -> torch.Tensor:
        """(S,) bool: which samples are copies."""
        return self.ratios < THIRD


class PictureIndex:
    """Pictures that may come back, and how far ordinary samples are from each of them.

    Args:
        table: (P, 12288) their thumbnails, in a file; None compares the samples of a prompt with each other.
        usual: (R, 3, 64, 64) thumbnails of samples that have nothing to do with the pictures; those that are one of
            the pictures are left out.
        rows: how many of the table's rows are in memory at once.
    """

    def __init__(self, table: RowFile | None, usual: torch.Tensor, rows: int = 1024) -> None:
        self.table, self.usual, self._rows = table, usual, rows
        away = torch.empty(len(usual), 0)
        if table is not None:
            away = torch.cat([distances(usual, part) for _, part in self._parts()], 1)
            others = (away > _EQUAL).all(1)
            if not bool(others.any()):
                shown, remedy = (
                    f"{len(usual)} training pictures",
                    "other ordinary captions, or samples of the base model",
                )
                raise refuse("usual samples", shown, "samples that are none of them", remedy)
            self.usual = usual = usual[others]
            away = away[others]
        first, second = torch.triu_indices(len(usual), len(usual), 1)
        self._pairs = (usual[first], usual[second])
        if table is None:
            self._levels = distances(usual, usual)[first, second].median()[None]
        else:
            self._levels = away.median(0).values
        self._altered = None if table is None else AlteredIndex(self._parts, usual)

    @property
    def level(self) -> float:
        """The usual distance, the median of all pictures'."""
        return float(self._levels.median())

    def _parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first, thumbnails) of some of the pictures after each other."""
        assert self.table is not None
        for start in range(0, self.table.shape[0], self._rows):
            numbers = range(start, min(start + self._rows, self.table.shape[0]))
            yield start, self.table.rows(numbers).float().view(-1, 3, SIDE, SIDE)

    def nearest(self, samples: torch.Tensor) -> Nearest:
        """Of the thumbnails (S, 3, 64, 64) of one prompt's samples."""
        if self.table is None:
            away = distances(samples, samples).fill_diagonal_(torch.inf)
            ratios, numbers = (away / self._levels.clamp_min(1e-6)).min(1)
            near = samples[numbers]
        else:
            ratios, numbers = self._closest(samples)
            near = self.table.rows(numbers.tolist()).float().view(-1, 3, SIDE, SIDE)
        kinds = torch.full((len(samples),), KINDS.index(UNALTERED))
        if self._altered is not None and bool((ratios >= THIRD).any()):
            others = (ratios >= THIRD).nonzero()[:, 0]
            altered = self._altered.nearest(samples[others])
            copied = altered.ratios < THIRD
            at = others[copied]
            ratios[at], numbers[at], kinds[at] = altered.ratios[copied], altered.numbers[copied], altered.kinds[copied]
            near[at] = altered.aligned[copied]
        maps = torch.stack([self._map(a, b) for a, b in zip(samples, near, strict=True)])
        areas = (maps < THIRD).float().mean((1, 2))
        # one after another: blurring all at once takes 3.5 MiB for each
        pairs = zip(samples.split(1), near.split(1), strict=True)
        similar = torch.cat([ms_ssim(sample, picture, betas_for(SIDE), 1.0) for sample, picture in pairs])
        return Nearest(ratios, numbers, areas, similar, maps, kinds)

    def _closest(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ratios, numbers = torch.full((len(samples),), torch.inf), torch.zeros(len(samples), dtype=torch.long)
        for start, part in self._parts():
            levels = self._levels[start : start + len(part)].clamp_min(1e-6)
            least, number = (distances(samples, part) / levels).min(1)
            nearer = least < ratios
            ratios, numbers = torch.where(nearer, least, ratios), torch.where(nearer, number + start, numbers)
        return ratios, numbers

    def _map(self, sample: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        """(64, 64): distance around each position, as a share of the usual one there.

        Where all pictures are alike, such as on a plain background, likeness says nothing: infinity.
        """
        usual = self._pairs if self.table is None else (self.usual, picture.expand_as(self.usual))
        there = _local(*usual).median(0).values
        fraction = (_local(sample[None], picture[None])[0] / there.clamp_min(_PLAIN**2)).sqrt()
        return torch.where(there < _PLAIN**2, torch.inf, fraction)


def _local(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(B, 64, 64) mean square of the difference under a Gaussian window of 11 pixels."""
    squares = (a - b).square().mean(1, keepdim=True)
    return blur(F.pad(squares, (_MARGIN,) * 4, mode="reflect"))[:, 0]


def overlay(picture: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """(3, H, W) in [0, 1]: what is copied in its colours, all else grey and dark.

    Args:
        picture: (3, H, W) in [0, 1].
        ratios: (64, 64) of :class:`Nearest`'s maps.
    """
    shown = (ratios < THIRD).float()[None, None]
    shown = F.interpolate(shown, picture.shape[-2:], mode="bilinear", align_corners=False)[0]
    grey = picture.mean(0, keepdim=True).expand_as(picture) * 0.25
    return shown * picture + (1 - shown) * grey
