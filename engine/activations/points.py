"""Parses points from text, JSON and painted masks, and renders matches."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import refuse
from ..io.files import parse_json
from ..io.number_checks import all_finite
from ..io.tables import lines_of
from .correspondence import Matches

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
        raise refuse("points", text, f"inside the picture of {width} x {height}",
                     "x counts from the left, y from above")  # fmt: skip
    return values, torch.tensor([positive for _, positive in rows])


def _line_clicks(text: str) -> list[tuple[list[Any], bool]]:
    lines = [line.replace(",", " ").split() for line in lines_of(text)]
    return [(line[1:], False) if line[0] == "not" else (line, True) for line in lines]


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
        for n, point in enumerate(dots.cpu()):
            _dot(canvas, point, COLOURS[n % len(COLOURS)], radius, hollow=mutual is not None and not bool(mutual[n]))
        pictures.append(canvas)
    return torch.cat(pictures, 1)


def _dot(picture: torch.Tensor, point: torch.Tensor, colour: tuple[float, ...], radius: float, hollow: bool) -> None:
    height, width = picture.shape[:2]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    distance = torch.hypot(x - point[0] * width, y - point[1] * height)
    picture[(distance <= radius + 1) & (distance > radius)] = 1.0
    inside = distance <= radius if not hollow else (distance <= radius) & (distance > 0.5 * radius)
    picture[inside] = torch.tensor(colour)
