"""Faces put together from layers that were drawn one by one, with exact parts and keypoints.

``draw_layers.mjs`` writes the file of layers from DiceBear's Avataaars (npm; design by Pablo Stanley, free for personal
and commercial use; code MIT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

from ...engine.errors import refuse
from ...engine.io.files import read_artefact
from ...engine.portraits.render import Pictures
from ...engine.portraits.scenes import POSE_NAMES, Scenes

KIND, VERSION = "avataaars layers", 1
KEYPOINTS = {
    "left_eye": (114, 120),
    "right_eye": (166, 120),
    "nose": (140, 136),
    "mouth": (140, 156),
    "chin": (140, 186),
    "left_ear": (80, 117),
    "right_ear": (200, 117),
}
"""In units of the drawing, which is 280 wide and high."""
CANVAS, CANVASES_AT_ONCE = 280, 4
OPAQUE = 127
"""Of 255: above it a pixel is the layer's part."""
Choice = tuple[str, tuple[tuple[str, str], ...]]
"""A value of a part, and the colours that its layer depends on: ((kind, word), ...)."""


@dataclass(frozen=True)
class FaceLayers:
    """The layers of a file.

    Attributes:
        path: of the file.
        pixels: (N + 1, 4, S, S) uint8, premultiplied RGBA; the last layer is empty.
        order: parts in the order of painting.
        palettes: kind of colour -> word -> RGB in hexadecimal digits.
        numbers: part -> choice -> layer.
    """

    path: Path
    pixels: torch.Tensor
    order: tuple[str, ...]
    palettes: Mapping[str, Mapping[str, str]]
    numbers: Mapping[str, Mapping[Choice, int]]

    @classmethod
    def open(cls, path: str | Path) -> FaceLayers:
        """The layers of a file that ``draw_layers.mjs`` wrote."""
        tensors, header = read_artefact(path, KIND, VERSION)
        table, pixels = header["layers"], tensors["layers"]
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 4 or len(pixels) != len(table):
            raise refuse("layers", tuple(pixels.shape), f"({len(table)}, S, S, 4) of uint8", "make the file again")
        numbers: dict[str, dict[Choice, int]] = {part: {} for part in header["order"]}
        for i, layer in enumerate(table):
            numbers[layer["part"]][layer["value"], tuple(sorted(layer["colours"].items()))] = i
        pixels = F.pad(pixels.movedim(-1, 1), (0, 0, 0, 0, 0, 0, 0, 1)).contiguous()
        return cls(Path(path), pixels, tuple(header["order"]), header["palettes"], numbers)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The parts that cover what is below them somewhere; Avataaars' nose is a faint shadow and never does."""
        covers = (self.pixels[:, 3] > OPAQUE).flatten(1).any(1)
        return tuple(part for part in self.order if bool(covers[list(self.numbers[part].values())].any()))

    def values(self, part: str) -> tuple[str, ...]:
        """The values of a part, in the file's order."""
        return tuple(dict.fromkeys(value for value, _ in self.numbers[part]))

    def kinds(self, part: str, value: str) -> tuple[str, ...]:
        """The kinds of colours that a value shows."""
        return next(tuple(kind for kind, _ in colours) for v, colours in self.numbers[part] if v == value)

    def layer(self, part: str, value: str, words: Mapping[str, str]) -> int:
        """Number of a part's layer in these colours; the empty layer for "none"."""
        if value == "none":
            return len(self.pixels) - 1
        return self.numbers[part][value, tuple((kind, words[kind]) for kind in self.kinds(part, value))]

    def compose(self, choice: torch.Tensor, backgrounds: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, P) layers in the order of painting, on B backgrounds -> (B, 3, S, S) colours and (B, S, S) part indices.

        Part 0 is the background, the others are ``labels``.
        """
        side = self.pixels.shape[-1]
        rgb = [[int(self.palettes["background"][word][i : i + 2], 16) / 255 for i in (0, 2, 4)] for word in backgrounds]
        colour = torch.tensor(rgb)[..., None, None].expand(-1, -1, side, side)
        parts = torch.zeros(len(choice), side, side)
        for k, part in enumerate(self.order):
            layer = self.pixels[choice[:, k]].float() / 255
            # Porter and Duff 1984: over, of premultiplied colours
            colour = layer[:, :3] + (1 - layer[:, 3:]) * colour
            if part in self.labels:
                parts = torch.where(self.pixels[choice[:, k], 3] > OPAQUE, 1.0 + self.labels.index(part), parts)
        return colour, parts

    def render(self, choice: torch.Tensor, scenes: Scenes, size: int) -> Pictures:
        """Pictures of B scenes from their (B, P) layers, each in its pose, ``size`` px."""
        images, parts = [], []
        words = scenes.values["background"]
        for rows in torch.arange(len(scenes)).split(CANVASES_AT_ONCE):
            some = scenes[rows.numpy()]
            drawn, labels = self.compose(choice[rows], [words[i] for i in some.column("background")])
            grid = _page_in_face(some, drawn.shape[-1])
            drawn = F.grid_sample(drawn, grid, padding_mode="border", align_corners=False)
            labels = F.grid_sample(labels[:, None], grid, "nearest", "border", align_corners=False)
            images.append(F.interpolate(drawn, (size, size), mode="bilinear", antialias=True, align_corners=False))
            parts.append(F.interpolate(labels, (size, size), mode="nearest-exact")[:, 0].to(torch.uint8))
        labelled = torch.cat(parts)
        points = _visible(_face_in_page(scenes), labelled, 1 + self.labels.index("top"))
        return Pictures(torch.cat(images).clamp(0, 1), labelled, points)


def _pose(scenes: Scenes) -> dict[str, torch.Tensor]:
    """Name -> (B, 1) of each pose entry, as in the portraits' renderer."""
    return {name: torch.from_numpy(scenes.pose[:, k])[:, None] for k, name in enumerate(POSE_NAMES)}


def _page_in_face(scenes: Scenes, side: int) -> torch.Tensor:
    """(B, S, S, 2): where in the unmoved drawing, in [-1, 1], the pixels of the page are."""
    pose, steps = _pose(scenes), (2 * torch.arange(side) + 1) / side - 1
    dx = steps.repeat(side) - pose["shift_x"]
    dy = steps.repeat_interleave(side) - pose["shift_y"]
    cos, sin = pose["tilt"].cos(), pose["tilt"].sin()
    x, y = (cos * dx + sin * dy) / pose["scale"], (cos * dy - sin * dx) / pose["scale"]
    return torch.stack([x, y], -1).view(-1, side, side, 2)


def _face_in_page(scenes: Scenes) -> torch.Tensor:
    """(B, K, 2) in [0, 1]: where the keypoints are in the pictures."""
    pose, (x, y) = _pose(scenes), 2 * torch.tensor(list(KEYPOINTS.values())).T / CANVAS - 1
    cos, sin = pose["tilt"].cos(), pose["tilt"].sin()
    page_x = pose["scale"] * (cos * x - sin * y) + pose["shift_x"]
    page_y = pose["scale"] * (sin * x + cos * y) + pose["shift_y"]
    return (torch.stack([page_x, page_y], -1) + 1) / 2


def _visible(points: torch.Tensor, parts: torch.Tensor, hair: int) -> torch.Tensor:
    """NaN for keypoints outside the picture, and below hair or hat."""
    side = parts.shape[-1]
    at = (points * side).long().clamp(0, side - 1)
    covered = parts[torch.arange(len(parts))[:, None], at[..., 1], at[..., 0]] == hair
    outside = ((points < 0) | (points > 1)).any(-1)
    return points.masked_fill((covered | outside)[..., None], torch.nan)
