"""SPair-71k (Min et al. 2019, arXiv 1908.10543): the published folder, a pipeline's matches, and their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...engine.activations.correspondence import feature_maps, find_correspondence, pck
from ...engine.errors import refuse
from ...engine.io.file_names import safe_name
from ...engine.io.files import named, parse_table
from ...engine.io.folders import files_in
from ...engine.io.number_checks import all_finite
from ...engine.io.picture_files import Stored, stored, turned_point
from ...engine.io.table_on_disk import RowFile
from ...engine.jobs.digests import digest
from ...engine.jobs.run import Run
from ...engine.pipelines.components import components_of
from ...engine.runtime.footprint import memory_bytes
from ...engine.runtime.progress import Progress, silent

if TYPE_CHECKING:
    from ...engine.pipelines import CorrespondencePipeline

SPLITS = ("trn", "val", "test")
GRID = 128
"""Positions to a side on which features are compared, as in the official code."""
PROMPT = "a photo of a {category}"
_BUDGET_PARTS = 4
"""Parts of the budget, one of which holds the joined features of pictures that pairs have in common."""
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

    def longer_side(self, box: bool) -> float:
        """Of the target's box, or of its image."""
        left, top, right, bottom = self.target_box
        return max(right - left, bottom - top) if box else float(max(self.target_size))


def read_spair(folder: str | Path, split: str = "test") -> list[SPairPair]:
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
    return [_pair(root, file, how_stored) for file in files]


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
    predicted = []
    for pair in pairs:
        points = find(pair)
        if points.shape != pair.target_points.shape:
            shapes = (tuple(points.shape), tuple(pair.target_points.shape))
            raise refuse("found points", shapes, "one per source point", f"see pair {pair.name}")
        predicted.append(pair.in_pixels(points))

    def scores(chosen: Sequence[int], box: bool) -> tuple[float, torch.Tensor]:
        sides = [pairs[i].longer_side(box) for i in chosen]
        return pck([predicted[i] for i in chosen], [pairs[i].target_points for i in chosen], sides, alpha)

    everything = range(len(pairs))
    (img, each_img), (bbox, each_bbox) = scores(everything, box=False), scores(everything, box=True)
    categories = {}
    for name in sorted({p.category for p in pairs}):
        members = [i for i in everything if pairs[i].category == name]
        categories[name] = (scores(members, box=False)[0], scores(members, box=True)[0])
    return SPairScore(img, bbox, each_img, each_bbox, categories, tuple(p.category for p in pairs))


@dataclass(frozen=True)
class TappedPictures:
    """What is tapped of each picture, which is squeezed to a square.

    Attributes:
        addresses: sites or globs.
        size: side in pixels; None takes the model's own.
        memory: budget for features in memory.
        tap: further settings, such as timestep, seeds, modulate, discard.
    """

    addresses: Sequence[str]
    size: int | None = None
    memory: int | str = "2GB"
    tap: Mapping[str, Any] = field(default_factory=dict)


def spair_scores(
    pipe: CorrespondencePipeline,
    pairs: Sequence[SPairPair],
    cache: Path,
    tapped: TappedPictures,
    progress: Progress = silent,
    matching: Progress = silent,
    alpha: float = 0.1,
) -> SPairScore:
    """Scores of the pairs by nearest features; the same call resumes where it was stopped.

    Args:
        cache: folder for the features and the matches.
        progress, matching: over pictures that are tapped, and over pairs.
    """
    files = {_name(file): (file, p.category) for p in pairs for file in (p.source, p.target)}
    prompts = {name: PROMPT.format(category=category) for name, (_, category) in files.items()}
    paths = {name: file for name, (file, _) in files.items()}
    taps = pipe.stream(
        paths,
        cache,
        prompts,
        list(tapped.addresses),
        size=tapped.size or max(pipe._adapter.usual_size()),
        memory=tapped.memory,
        progress=progress,
        **{name: value for name, value in tapped.tap.items() if value},
    )
    sites = [a for part in taps.parts for a in part]
    each = feature_maps(taps.read([next(iter(files))], sites)).nbytes

    @lru_cache(maxsize=max(2, memory_bytes(tapped.memory) // _BUDGET_PARTS // each))
    def features(name: str) -> torch.Tensor:
        return feature_maps(taps.read([name], sites))

    settings = {"grid": GRID, "addresses": list(tapped.addresses), "size": tapped.size, "tap": dict(tapped.tap)}
    most = max(len(p.source_points) for p in pairs)
    asked = [[p.name, p.source_points, list(p.source_size), list(p.target_size)] for p in pairs]
    folder = cache / f"matched-{digest([asked, settings])[:12]}"  # a cache may serve many choices of pairs
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].source, pairs[i].target))  # pictures in common together
    pictures = [Path(path) for path in paths.values()]
    inputs = {**components_of(pipe), "pictures": pictures, "prompts": prompts, "settings": settings}
    with Run(folder, "SPair matches", inputs, ("rows.json",)), RowFile(folder, (len(pairs), 2 * most)) as table:
        for step, i in enumerate(order):
            if not table.done[i]:
                source, target = (
                    F.interpolate(
                        features(_name(file)).to(pipe._adapter.device).float(),
                        (GRID, GRID),
                        mode="bilinear",
                        align_corners=False,
                    )[0]
                    for file in (pairs[i].source, pairs[i].target)
                )
                row = torch.zeros(most, 2)
                points = find_correspondence(source, target, pairs[i].query_points().to(source)).points
                row[: len(points)] = points.cpu()
                table.write(i, row.flatten()[None])
            matching(step + 1, len(pairs), None)
        rows = table.rows(range(len(pairs))).view(len(pairs), most, 2)
    matches = {p.name: row[: len(p.source_points)] for p, row in zip(pairs, rows, strict=True)}
    return score_spair(pairs, lambda p: matches[p.name], alpha)


def _name(file: Path) -> str:
    """A picture's name in the cache; pictures of two categories may share a file name."""
    return f"{file.parent.name}/{file.name}"
