"""SPair-71k (Min et al. 2019, arXiv 1908.10543), read from the published folder, and its scores.

``vitrine taps spair`` scores a model's sites as in GDF's Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import refuse
from ..io.file_names import safe_name
from ..io.files import named, parse_table
from ..io.folders import files_in
from ..io.number_checks import all_finite
from ..io.picture_files import Stored, stored, turned_point
from .correspondence import find_correspondence, pck

SPLITS = ("trn", "val", "test")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class SPairPair:
    """One annotated pair; all numbers in pixels of the original images, x before y.

    Attributes:
        name: the annotation file's name without its suffix.
        source, target: image files.
        source_points, target_points: (N, 2) float32, row n of both is the same keypoint.
        source_size, target_size: width, height.
        source_box, target_box: left, top, right, bottom of the object.
    """

    name: str
    category: str
    source: Path
    target: Path
    source_points: torch.Tensor
    target_points: torch.Tensor
    source_size: tuple[int, int]
    target_size: tuple[int, int]
    source_box: Box
    target_box: Box

    def query_points(self) -> torch.Tensor:
        """(N, 2) source points as x, y in [0, 1], for :func:`find_correspondence`."""
        return (self.source_points / torch.tensor(self.source_size)).clamp(0, 1)

    def in_pixels(self, points: torch.Tensor) -> torch.Tensor:
        """(N, 2) target points in pixels from x, y in [0, 1]."""
        return points.cpu() * torch.tensor(self.target_size)


def read_spair(folder: str | Path, split: str = "test", category: str | None = None) -> list[SPairPair]:
    """All pairs of one split, in the order of their file names.

    ``folder`` has ``PairAnnotation/<split>/*.json`` and ``JPEGImages/<category>/*.jpg``. Headers of existing images are
    read: if EXIF says that an image is rotated, its points and box are rotated with it.
    """
    if split not in SPLITS:
        raise refuse("split", split, ", ".join(SPLITS), "SPair-71k calls training 'trn'")
    root = Path(folder)
    files = files_in(root / "PairAnnotation" / split, ".json")
    if not files:
        accepted = f"PairAnnotation/{split}/*.json below it"
        raise refuse("SPair-71k folder", str(folder), accepted, "unpack SPair-71k and give the folder of that name")
    how_stored = lru_cache(maxsize=None)(stored)
    pairs = [_pair(root, file, how_stored) for file in files]
    if category is None:
        return pairs
    chosen = [p for p in pairs if p.category == category]
    if not chosen:
        raise refuse("category", category, sorted({p.category for p in pairs}), "leave it out for all")
    return chosen


def _pair(root: Path, file: Path, how_stored: Callable[[Path], Stored]) -> SPairPair:
    with named(file, "SPair-71k annotation", "the keys of SPair-71k", "unpack the data set again"):
        annotation = parse_table(file.read_text(encoding="utf-8"))
        (source, points, size, box), (target, target_points, target_size, target_box) = (
            _end(root, annotation, prefix, how_stored) for prefix in ("src", "trg")
        )
    if points.shape != target_points.shape or points.ndim != 2 or points.shape[1] != 2:
        shapes = (tuple(points.shape), tuple(target_points.shape))
        raise refuse("SPair-71k points", shapes, "(N, 2) twice", f"look into {file.name}")
    return SPairPair(
        file.stem, annotation["category"], source, target, points, target_points, size, target_size, box, target_box
    )


def _end(
    root: Path, annotation: dict[str, Any], prefix: str, how_stored: Callable[[Path], Stored]
) -> tuple[Path, torch.Tensor, tuple[int, int], Box]:
    """Upright image, points, size and box of the source (``src``) or the target (``trg``)."""
    width, height = (int(v) for v in annotation[f"{prefix}_imsize"][:2])
    box = tuple(float(v) for v in annotation[f"{prefix}_bndbox"])
    points = torch.tensor(annotation[f"{prefix}_kps"], dtype=torch.float32)
    if len(box) != 4 or min(width, height) < 1 or not all(map(math.isfinite, box)) or not all_finite(points):
        raise ValueError(f"a picture of {width} x {height} with a box {box}")
    folder, name = safe_name(annotation["category"]), safe_name(annotation[f"{prefix}_imname"])
    picture = root / "JPEGImages" / folder / name
    seen = how_stored(picture) if picture.is_file() else Stored(width, height, 1)
    if seen.orientation == 1 or (seen.width, seen.height) != (width, height):
        return picture, points, (width, height), (box[0], box[1], box[2], box[3])
    points = torch.tensor([turned_point(x, y, seen) for x, y in points.tolist()]).reshape(points.shape)
    (left, top), (right, bottom) = turned_point(*box[:2], seen), turned_point(*box[2:], seen)
    size, columns, rows = seen.size[::-1], sorted((left, right)), sorted((top, bottom))
    return picture, points, size, (columns[0], rows[0], columns[1], rows[1])


@dataclass(frozen=True)
class SPairScore:
    """PCK over points (GDF, Table 1), relative to the image's and to the box's longer side, and by category.

    Attributes:
        img, bbox: over all points.
        each_img, each_bbox: (P,) of each pair, for a bootstrap.
        categories: name -> (img, bbox) over that category's points.
        names: the category of each pair.
    """

    img: float
    bbox: float
    each_img: torch.Tensor
    each_bbox: torch.Tensor
    categories: dict[str, tuple[float, float]]
    names: tuple[str, ...] = ()

    def totals(self, box: bool) -> dict[str, float]:
        """The four averages used in papers: over points or images, all pairs pooled or the mean of categories."""
        each = self.each_bbox if box else self.each_img
        groups = {name: [i for i, n in enumerate(self.names) if n == name] for name in self.categories}
        by_picture = [float(each[group].nanmean()) for group in groups.values()]
        by_point = [scores[int(box)] for scores in self.categories.values()]
        return {
            "per point, all": self.bbox if box else self.img,
            "per point, mean of categories": sum(by_point) / len(by_point),
            "per picture, all": float(each.nanmean()),
            "per picture, mean of categories": sum(by_picture) / len(by_picture),
        }


def score_spair(
    pairs: Sequence[SPairPair], find: Callable[[SPairPair], torch.Tensor], alpha: float = 0.1
) -> SPairScore:
    """PCK@alpha of a matcher.

    Args:
        find: gives the (N, 2) target points x, y in [0, 1] of one pair.
    """
    if not pairs:
        raise refuse("pairs", 0, "at least one", "read a split with read_spair")
    predicted = [_checked(pair, find(pair)) for pair in pairs]
    img, each_img = _scores(pairs, predicted, alpha, box=False)
    bbox, each_bbox = _scores(pairs, predicted, alpha, box=True)
    categories = {}
    for name in sorted({p.category for p in pairs}):
        chosen = [i for i, p in enumerate(pairs) if p.category == name]
        members, points = [pairs[i] for i in chosen], [predicted[i] for i in chosen]
        categories[name] = (_scores(members, points, alpha, False)[0], _scores(members, points, alpha, True)[0])
    return SPairScore(img, bbox, each_img, each_bbox, categories, tuple(p.category for p in pairs))


def nearest_points(
    pair: SPairPair, features_of: Callable[[Path], torch.Tensor], grid: int | None = None
) -> torch.Tensor:
    """(N, 2) target points x, y in [0, 1] of one pair by nearest features.

    Args:
        features_of: image file -> features (C, h, w).
        grid: side of the grid on which features are compared, resized bilinearly; None keeps theirs.
    """
    maps = [features_of(file)[None].float() for file in (pair.source, pair.target)]
    if grid is not None:
        maps = [F.interpolate(m, (grid, grid), mode="bilinear", align_corners=False) for m in maps]
    return find_correspondence(maps[0][0], maps[1][0], pair.query_points().to(maps[0])).points


def _checked(pair: SPairPair, points: torch.Tensor) -> torch.Tensor:
    if points.shape != pair.target_points.shape:
        shapes = (tuple(points.shape), tuple(pair.target_points.shape))
        raise refuse("found points", shapes, "one per source point", f"see pair {pair.name}")
    return pair.in_pixels(points)


def _scores(
    pairs: Sequence[SPairPair], predicted: Sequence[torch.Tensor], alpha: float, box: bool
) -> tuple[float, torch.Tensor]:
    return pck(predicted, [p.target_points for p in pairs], [_longer_side(p, box) for p in pairs], alpha)


def _longer_side(pair: SPairPair, box: bool) -> float:
    left, top, right, bottom = pair.target_box
    return max(right - left, bottom - top) if box else float(max(pair.target_size))
