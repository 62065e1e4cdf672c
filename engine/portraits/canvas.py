"""The renderer's canvas: coordinates of each scene, painted pixels, and shapes as signed distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from .scenes import ATTRIBUTES, GEOMETRY_NAMES, POSE_NAMES, Scenes

PARTS = ("background", "skin", "hair", "beard", "eyes", "glasses", "nose", "mouth", "hat", "shirt", "mole")
KEYPOINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth", "chin", "left_ear", "right_ear", "hat_brim")

_COLORS: dict[str, tuple] = {
    "background": (
        (110, 165, 230),
        (125, 195, 120),
        (240, 215, 110),
        (245, 170, 190),
        (165, 125, 205),
        (165, 168, 172),
    ),
    "skin": ((250, 220, 196), (222, 172, 128), (178, 140, 88), (112, 72, 48)),
    "hair_color": ((32, 28, 30), (104, 64, 34), (236, 200, 92), (204, 78, 30), (236, 236, 240)),
    "shirt": ((186, 30, 52), (30, 44, 110), (20, 140, 140), (246, 238, 212)),
}
INK = (40, 30, 32)
Extent: TypeAlias = "torch.Tensor | float"


class Canvas:
    """Pixel coordinates in each scene's face frame, and the image painted so far."""

    if TYPE_CHECKING:  # every geometry and pose column is an attribute of shape (B, 1, 1)

        def __getattr__(self, name: str) -> torch.Tensor: ...

    def __init__(self, scenes: Scenes, size: int, crop: tuple, flip: bool, device: torch.device) -> None:
        self.size, self.crop, self.flip, self.device = size, crop, flip, device
        self.scenes, self.count = scenes, len(scenes)
        for names, table in ((GEOMETRY_NAMES, scenes.geometry), (POSE_NAMES, scenes.pose)):
            for k, name in enumerate(names):
                setattr(self, name, self._column(table[:, k]))
        steps = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) / size
        px = crop[0] + (crop[2] - crop[0]) * (1 - steps if flip else steps)
        py = crop[1] + (crop[3] - crop[1]) * steps
        self.page_x, self.page_y = (2 * px - 1).view(1, 1, -1), (2 * py - 1).view(1, -1, 1)
        dx, dy = self.page_x - self.shift_x, self.page_y - self.shift_y
        cos, sin = torch.cos(self.tilt), torch.sin(self.tilt)
        self.x, self.y = (cos * dx + sin * dy) / self.scale, (cos * dy - sin * dx) / self.scale
        self.pixel = 2 * (crop[2] - crop[0]) / size / self.scale  # one pixel in face units
        self.jitter = torch.as_tensor(scenes.jitter, device=device)
        self.color = torch.zeros(self.count, 3, size, size, device=device)
        self.parts = torch.zeros(self.count, size, size, dtype=torch.uint8, device=device)

    def _column(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device).view(-1, 1, 1)

    def has(self, name: str, *words: str) -> torch.Tensor:
        """(B, 1, 1) bool: whether the attribute is one of these words."""
        wanted = torch.tensor([ATTRIBUTES[name].index(w) for w in words], device=self.device)
        return torch.isin(self._column(self.scenes.column(name)), wanted)

    def palette(self, name: str, shade: int, amount: float = 0.035) -> torch.Tensor:
        """(B, 3, 1, 1) colour of an attribute with its per-scene jitter."""
        table = torch.tensor(_COLORS[name], device=self.device, dtype=torch.float32) / 255
        picked = table[torch.as_tensor(self.scenes.column(name), device=self.device)]
        return (picked + amount * self.jitter[:, shade]).clamp(0, 1)[..., None, None]

    def paint(
        self, part: str, distance: torch.Tensor, color: torch.Tensor | tuple, when: torch.Tensor | None = None
    ) -> None:
        """Paints where the signed distance (face units) is negative, anti-aliased over one pixel."""
        if isinstance(color, tuple):
            color = torch.tensor(color, device=self.device, dtype=torch.float32).view(1, 3, 1, 1) / 255
        cover = (0.5 - distance / self.pixel).clamp(0, 1)
        if when is not None:
            cover = cover * when
        self.color = self.color + cover[:, None] * (color - self.color)
        self.parts = torch.where(cover > 0.5, PARTS.index(part), self.parts)

    def keypoints(self) -> torch.Tensor:
        """(B, 9, 2) in [0, 1] of the image; NaN outside it."""
        eye, chin = self.eye_distance, HEAD_Y + self.head_height
        ear = self.head_width + 0.02
        brim = torch.where(self.has("hat", "cap-left"), -0.62, torch.where(self.has("hat", "cap-right"), 0.62, 0.0))
        brim_x = torch.where(self.has("hat", "none"), torch.nan, brim)
        zero = torch.zeros_like(eye)
        pairs = (
            (-eye, self.eye_height),
            (eye, self.eye_height),
            (zero, nose_tip(self)),
            (-self.mouth_width, self.mouth_height),
            (self.mouth_width, self.mouth_height),
            (zero, chin),
            (-ear, zero + 0.06),
            (ear, zero + 0.06),
            (brim_x, zero + HAT_Y),
        )
        x, y = (torch.stack([p[k].expand_as(eye) for p in pairs], 1).flatten(1) for k in (0, 1))
        scale, tilt = self.scale.flatten(1), self.tilt.flatten(1)
        cos, sin = torch.cos(tilt), torch.sin(tilt)
        page_x = scale * (cos * x - sin * y) + self.shift_x.flatten(1)
        page_y = scale * (sin * x + cos * y) + self.shift_y.flatten(1)
        left, top, right, bottom = self.crop
        u = ((page_x + 1) / 2 - left) / (right - left)
        v = ((page_y + 1) / 2 - top) / (bottom - top)
        points = torch.stack([1 - u if self.flip else u, v], -1)
        outside = (points < 0).any(-1, keepdim=True) | (points > 1).any(-1, keepdim=True)
        return points.masked_fill(outside, torch.nan)


HEAD_Y, HAT_Y = 0.08, -0.27


def nose_tip(c: Canvas) -> torch.Tensor:
    """(B, 1, 1) height of the nose tip in face units."""
    return c.eye_height + 0.07 + c.nose_length


# --- shapes: signed distance in face units, negative inside ------------------------------------------------------
def ellipse(x: torch.Tensor, y: torch.Tensor, rx: Extent, ry: Extent, power: Extent = 2.0) -> torch.Tensor:
    """First-order distance to a superellipse |x/rx|^p + |y/ry|^p = 1."""
    level = ((x / rx).abs().clamp(min=1e-6) ** power + (y / ry).abs().clamp(min=1e-6) ** power) ** (1 / power)
    return (level - 1) * torch.minimum(torch.as_tensor(rx, device=x.device), torch.as_tensor(ry, device=x.device))


def box(x: torch.Tensor, y: torch.Tensor, hx: Extent, hy: Extent, round_: float = 0.0) -> torch.Tensor:
    """Distance to a rectangle of half sides hx, hy whose corners are rounded by ``round_``."""
    qx, qy = x.abs() - hx + round_, y.abs() - hy + round_
    return torch.hypot(qx.clamp(min=0), qy.clamp(min=0)) + torch.maximum(qx, qy).clamp(max=0) - round_


def circles(c: Canvas, centres: list[tuple[float, float]], radius: torch.Tensor, lift: torch.Tensor) -> torch.Tensor:
    """Union of equal circles on the head's outline: curls."""
    best = torch.full_like(c.x, 9.0)
    for ax, ay in centres:
        dx, dy = c.x - ax * (c.head_width + lift), c.y - HEAD_Y - ay * (c.head_height + lift)
        best = torch.minimum(best, torch.hypot(dx, dy))
    return best - radius


CURLS = [(-1.0, 0.25), (-1.05, -0.1), (-0.95, -0.42), (-0.72, -0.72), (-0.38, -0.93), (0.0, -1.02)]
CURLS += [(-x, y) for x, y in CURLS[:-1]]
TOP_CURLS = [(-0.7, -0.62), (-0.36, -0.78), (0.0, -0.84), (0.36, -0.78), (0.7, -0.62)]
