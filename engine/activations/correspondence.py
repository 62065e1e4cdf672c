"""Semantic correspondence: finds a point of one image in another, from activations alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import refuse
from ..io.files import parse_json
from ..io.number_checks import all_finite
from ..io.tables import lines_of
from .container import Activations


@dataclass(frozen=True)
class Matches:
    """Positions of N points of a source image in a target image.

    Attributes:
        points: (N, 2) x, y in [0, 1] of the target.
        similarity: (N,) cosine similarity of the two features.
        mutual: (N,) bool, the nearest neighbour of the target point in the source is in the source
            point's cell or an adjacent one.
    """

    points: torch.Tensor
    similarity: torch.Tensor
    mutual: torch.Tensor


def feature_maps(taps: Activations, size: tuple[int, int] | None = None) -> torch.Tensor:
    """(B, C, H, W): all spatial sites, normalised at every position, resized bilinearly and concatenated.

    Features are normalised first, so that no site dominates by its scale.
    """
    maps = [v.tensor.float() for v in taps.values() if v.grid is not None and v.tensor.ndim == 4]
    if not maps:
        raise refuse("activations", list(taps), "at least one layer with a grid", "tap a spatial layer")
    size = size or max(((m.shape[-2], m.shape[-1]) for m in maps), key=lambda s: s[0] * s[1])
    resized = [F.interpolate(F.normalize(m, dim=1), size=size, mode="bilinear", align_corners=False) for m in maps]
    return F.normalize(torch.cat(resized, 1), dim=1)


def sample_points(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """(N, C) features of (C, H, W) at (N, 2) points x, y in [0, 1], bilinear between cell centres, clamped at edges."""
    grid = (points.to(features) * 2 - 1).view(1, 1, -1, 2)
    sampled = F.grid_sample(features[None], grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled[0, :, 0].T


def similarity(features: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """(..., H, W) in [-1, 1]: at each cell of (..., C, H, W), the cosine to the nearest of (N, C) queries."""
    cells = F.normalize(features.flatten(-2), dim=-2)
    return (F.normalize(queries, dim=1) @ cells).amax(-2).unflatten(-1, features.shape[-2:])


def find_correspondence(
    source: torch.Tensor, target: torch.Tensor, points: torch.Tensor, *, temperature: float = 0.0, window: int = 2
) -> Matches:
    """Cosine nearest neighbour of each source point among the target's cells.

    Args:
        source, target: (C, H, W) feature maps of one image each, e.g. from :func:`feature_maps`.
        points: (N, 2) x, y in [0, 1].
        temperature: 0 takes the best cell's centre; above 0, a soft argmax over cells within ``window`` of it.
        window: in cells.
    """
    _check(source, target, points)
    # Cosine similarity of every point with every cell.
    queries = F.normalize(sample_points(source, points), dim=1)
    cells = F.normalize(target.flatten(1), dim=0)
    cosines = queries @ cells
    similarity, best = cosines.max(1)
    height, width = target.shape[-2:]
    matched = _centres(best, height, width)
    if temperature > 0:  # softmax-weighted centre of the cells near the best one
        every = torch.arange(height * width, device=cosines.device)
        away_x = (every % width)[None] - (best % width)[:, None]
        away_y = (every // width)[None] - (best // width)[:, None]
        near = (away_x.abs() <= window) & (away_y.abs() <= window)
        weights = torch.softmax((cosines / temperature).masked_fill(~near, float("-inf")), 1)
        matched = weights @ _centres(every, height, width).to(weights)
    return Matches(matched, similarity, _mutual(source, target, points, matched))


def _centres(index: torch.Tensor, height: int, width: int) -> torch.Tensor:
    y, x = index // width, index % width
    return torch.stack([(x + 0.5) / width, (y + 0.5) / height], 1)


def _mutual(source: torch.Tensor, target: torch.Tensor, points: torch.Tensor, matched: torch.Tensor) -> torch.Tensor:
    back = F.normalize(sample_points(target, matched), dim=1) @ F.normalize(source.flatten(1), dim=0)
    height, width = source.shape[-2:]
    landed = _centres(back.argmax(1), height, width)
    cells = torch.tensor([width, height], device=points.device)
    return ((landed - points.to(landed)) * cells).abs().amax(1) <= 1.5


def _check(source: torch.Tensor, target: torch.Tensor, points: torch.Tensor) -> None:
    if points.ndim != 2 or points.shape[-1] != 2 or not len(points):
        raise refuse("points", tuple(points.shape), "(N, 2) with N >= 1", "give at least one point as x, y in [0, 1]")
    if not bool(((points >= 0) & (points <= 1)).all()):
        raise refuse("points", points.tolist(), "x, y in [0, 1]", "divide pixels by the picture's width and height")
    if source.ndim != 3 or target.ndim != 3 or source.shape[0] != target.shape[0]:
        shapes = (tuple(source.shape), tuple(target.shape))
        raise refuse("features", shapes, "(C, H, W) and (C, H, W)", "tap the same layers of both pictures")


def flip_ensemble(plain: torch.Tensor, flipped: torch.Tensor) -> torch.Tensor:
    """Mean of (B, C, H, W) features of images and of their mirror images, flipped back.

    The result is symmetric: it helps for single parts, and confuses pairs such as left and right eyes.
    """
    return F.normalize(plain + flipped.flip(-1), dim=1)


def pck(
    predicted: Sequence[torch.Tensor],
    true: Sequence[torch.Tensor],
    scale: Sequence[float | torch.Tensor],
    alpha: float = 0.1,
) -> tuple[float, torch.Tensor]:
    """(PCK over all points, (P,) PCK of each pair): fraction of points within ``alpha`` * scale of the truth.

    Args:
        predicted, true: for each of P pairs (N_i, 2) in one unit; rows with NaN in ``true`` are left out.
        scale: for each pair, the longer side of the image ("img") or of the object's box ("bbox"), same unit.
    """
    lengths = (len(predicted), len(true), len(scale))
    if len(set(lengths)) != 1 or not len(predicted):
        raise refuse("pairs", lengths, "three lists of one length", "one entry per pair")
    hits = []
    for ours, truth, side in zip(predicted, true, scale, strict=True):
        visible = ~torch.isnan(truth).any(1)
        hits.append(((ours - truth).norm(dim=1)[visible] <= alpha * float(side)).float())
    by_pair = torch.stack([h.mean() if len(h) else torch.tensor(float("nan")) for h in hits])
    return float(torch.cat(hits).mean()), by_pair


COLOURS = ((0.90, 0.22, 0.27), (0.16, 0.62, 0.56), (0.96, 0.64, 0.14), (0.27, 0.42, 0.85), (0.62, 0.30, 0.71))


def parse_points(text: str, width: int, height: int) -> torch.Tensor:
    """(N, 2) in [0, 1] from lines ``x y``: fractions, or pixels if any number is above 1.

    The JSON of other packs is also accepted: ``[{"x": 31, "y": 20}]`` (KJNodes, SAM nodes).
    """
    points, positive = parse_clicks(text, width, height)
    if not bool(positive.all()):
        raise refuse("points", text, "points to look for", "points not wanted mean something in Segment Like This")
    return points


def parse_clicks(text: str, width: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 2) points in [0, 1] and (N,) bool, True for positive ones, from lines ``x y`` and ``not x y``.

    Also accepts the JSON of other packs: ``{"positive": [{"x": 31, "y": 20}], "negative": []}``, or one such list.
    """
    try:
        rows = _json_clicks(text) if text.lstrip()[:1] in ("[", "{") else _line_clicks(text)
        values = torch.tensor([[float(number) for number in numbers] for numbers, _ in rows])
        valid = values.ndim == 2 and values.shape[1] == 2 and all_finite(values)
    except (ValueError, TypeError, KeyError, AttributeError):
        valid = False
    if not valid:
        raise refuse("points", text, "lines of two numbers: x y", "e.g. 0.5 0.4")
    if bool((values > 1).any()):
        values = values / torch.tensor([width, height])
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise refuse(
            "points", text, f"inside the picture of {width} x {height}", "x counts from the left, y from above"
        )
    return values, torch.tensor([positive for _, positive in rows])


def _line_clicks(text: str) -> list[tuple[list[Any], bool]]:
    lines = [line.replace(",", " ").split() for line in lines_of(text)]
    return [(line[1:], False) if line[:1] == ["not"] else (line, True) for line in lines]


def _json_clicks(text: str) -> list[tuple[list[Any], bool]]:
    tree = parse_json(text)
    lists = [(tree, True)] if isinstance(tree, list) else [(tree.get(k, []), k == "positive") for k in _SIGNS]
    return [([point["x"], point["y"]], positive) for points, positive in lists for point in points]


_SIGNS = ("positive", "negative")


def parse_keypoints(text: str, pictures: int, size: tuple[int, int]) -> torch.Tensor:
    """(B, K, 2) in [0, 1] from one line per image: ``x y; x y; -``, where ``-`` is a hidden point.

    Args:
        size: (width, height) of the images, for points in pixels.
    """
    lines = [line.split(";") for line in lines_of(text)]
    if len(lines) != pictures or len({len(line) for line in lines}) != 1:
        shown = f"{len(lines)} lines of {sorted({len(line) for line in lines})} points"
        raise refuse("keypoints", shown, f"{pictures} lines of equally many", "x y; x y; - on each, - where hidden")
    hidden = torch.full((1, 2), float("nan"))
    rows = [[hidden if p.strip() == "-" else parse_points(p, *size) for p in line] for line in lines]
    if any(len(point) != 1 for row in rows for point in row):
        raise refuse("keypoints", text, "x y between semicolons", "x y; x y; -")
    return torch.stack([torch.cat(row) for row in rows])


def mask_points(mask: torch.Tensor) -> torch.Tensor:
    """(N, 2) centres, x and y in [0, 1], of the connected parts of a mask (H, W) or (1, H, W), in reading order."""
    painted = (mask[0] if mask.ndim == 3 else mask) > 0.5
    if not bool(painted.any()):
        raise refuse("mask", "empty", "at least one painted spot", "paint where the points are, or use the text field")
    height, width = painted.shape
    numbers = _labels(painted)
    components = [torch.nonzero(numbers == k).float() for k in numbers.unique().tolist() if k]
    centres = [(s.mean(0).flip(0) + 0.5) / torch.tensor([width, height]) for s in components]
    return torch.stack(sorted(centres, key=lambda p: (float(p[1]), float(p[0]))))


def _labels(painted: torch.Tensor) -> torch.Tensor:
    """(H, W) int labels of connected components (8 neighbours), 0 for unpainted pixels.

    Every pixel takes the largest number among its painted neighbours until nothing changes.
    """
    numbers = torch.arange(1, painted.numel() + 1, dtype=torch.float32).view_as(painted) * painted
    while True:
        grown = torch.nn.functional.max_pool2d(numbers[None, None], 3, 1, 1)[0, 0] * painted
        if torch.equal(grown, numbers):
            return numbers.long()
        numbers = grown


def draw_matches(source: torch.Tensor, target: torch.Tensor, points: torch.Tensor, matches: Matches) -> torch.Tensor:
    """(H, 2 W, 3) in [0, 1]: both images side by side, one colour per pair of points, unreliable ones hollow.

    Args:
        source, target: (H, W, 3) in [0, 1]; a target of another height is scaled to the source's.
        points: (N, 2) x, y in [0, 1] of the source; ``matches`` has their positions in the target.
    """
    height = source.shape[0]
    radius = max(1.5, height / 40)
    if target.shape[0] != height:
        side = (height, round(target.shape[1] * height / target.shape[0]))
        target = torch.nn.functional.interpolate(target.movedim(-1, 0)[None], side, mode="bilinear")[0].movedim(0, -1)
    pictures = []
    for picture, dots, mutual in ((source, points, None), (target, matches.points, matches.mutual)):
        canvas = picture[..., :3].detach().clone().cpu().float()
        rows, columns = canvas.shape[:2]
        y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        for n, point in enumerate(dots.cpu()):
            distance = torch.hypot(x - point[0] * columns, y - point[1] * rows)
            canvas[(distance <= radius + 1) & (distance > radius)] = 1.0
            hollow = mutual is not None and not bool(mutual[n])
            inside = distance <= radius if not hollow else (distance <= radius) & (distance > 0.5 * radius)
            canvas[inside] = torch.tensor(COLOURS[n % len(COLOURS)])
        pictures.append(canvas)
    return torch.cat(pictures, 1)
