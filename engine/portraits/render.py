"""The renderer: signed distances, painted back to front, with exact ground truth beside the picture.

All shapes are evaluated for the whole batch at once in torch, on any device. Edges are anti-aliased over one pixel of
the *output*, so the same scene can be drawn at 32, 64 or 128 px, or cropped, and stays sharp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from ..errors import refuse
from .details import add_details
from .scenes import ATTRIBUTES, GEOMETRY_NAMES, POSE_NAMES, Scenes

PARTS = ("background", "skin", "hair", "beard", "eyes", "glasses", "nose", "mouth", "hat", "shirt", "mole")
KEYPOINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth", "chin", "left_ear", "right_ear", "hat_brim")

_COLORS: dict[str, tuple] = {
    "background": (
        (110, 165, 230), (125, 195, 120), (240, 215, 110), (245, 170, 190), (165, 125, 205), (165, 168, 172),
    ),
    "skin": ((250, 220, 196), (222, 172, 128), (178, 140, 88), (112, 72, 48)),
    "hair_color": ((32, 28, 30), (104, 64, 34), (236, 200, 92), (204, 78, 30), (236, 236, 240)),
    "shirt": ((186, 30, 52), (30, 44, 110), (20, 140, 140), (246, 238, 212)),
}  # fmt: skip
_INK = (40, 30, 32)
Extent: TypeAlias = "torch.Tensor | float"


@dataclass(frozen=True)
class Pictures:
    """What :func:`render` draws.

    Attributes:
        images: (B, 3, S, S) float32 in [0, 1].
        parts: (B, S, S) uint8, index into ``PARTS`` of the part that covers each pixel.
        keypoints: (B, 9, 2) float32, (x, y) in [0, 1] of the picture; NaN where absent (hat brim) or cropped away.
    """

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor


def render(
    scenes: Scenes,
    size: int = 64,
    *,
    crop: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
    flip: bool = False,
    original_size: int | None = None,
    details: bool = False,
    device: torch.device | str = "cpu",
) -> Pictures:
    """Draw B scenes at ``size`` x ``size`` pixels.

    Args:
        crop: (left, top, right, bottom) of the window shown, as fractions of the full picture; must be square.
        flip: mirror left and right (a cap that points left then points right; captions must follow).
        original_size: draw at this many pixels first and resize bilinearly: the loss of detail that a small
            source picture has after upscaling. None draws at ``size``.
        details: strands of hair, light on skin and cloth, and more that 128 px have room for.

    Raises:
        VitrineError: If a size is below 8, or the crop is empty, outside [0, 1] or not square.
    """
    _check_view(size, crop, original_size)
    drawn = original_size or size
    canvas = _Canvas(scenes, drawn, crop, flip, torch.device(device))
    _paint(canvas)
    if details:
        add_details(canvas)
    images, parts = canvas.color.clamp(0, 1), canvas.parts
    if drawn != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=drawn > size)
        parts = F.interpolate(parts[:, None].float(), (size, size), mode="nearest")[:, 0].to(torch.uint8)
    return Pictures(images, parts, canvas.keypoints())


def _check_view(size: int, crop: tuple[float, float, float, float], original_size: int | None) -> None:
    if min(size, original_size or size) < 8:
        raise refuse("picture size", (size, original_size), "sizes of at least 8 px", "draw larger")
    left, top, right, bottom = crop
    inside = 0 <= left < right <= 1 and 0 <= top < bottom <= 1
    if not inside or abs((right - left) - (bottom - top)) > 1e-6:
        raise refuse("crop", crop, "a square (left, top, right, bottom) inside [0, 1]", "e.g. (0.1, 0.0, 0.9, 0.8)")


class _Canvas:
    """Pixel coordinates in each scene's own face frame, and the paint so far."""

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
        """(B, 1, 1) bool: is the attribute one of these words."""
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
        """Cover where the signed distance (face units, negative inside) says so, blending over one pixel."""
        if isinstance(color, tuple):
            color = torch.tensor(color, device=self.device, dtype=torch.float32).view(1, 3, 1, 1) / 255
        cover = (0.5 - distance / self.pixel).clamp(0, 1)
        if when is not None:
            cover = cover * when
        self.color = self.color + cover[:, None] * (color - self.color)
        self.parts = torch.where(cover > 0.5, PARTS.index(part), self.parts)

    def keypoints(self) -> torch.Tensor:
        """(B, 9, 2) of the picture, in [0, 1]; NaN outside it."""
        eye, chin = self.eye_distance, HEAD_Y + self.head_height
        ear = self.head_width + 0.02
        brim = torch.where(self.has("hat", "cap-left"), -0.62, torch.where(self.has("hat", "cap-right"), 0.62, 0.0))
        brim_x = torch.where(self.has("hat", "none"), torch.nan, brim)
        zero = torch.zeros_like(eye)
        pairs = (
            (-eye, self.eye_height), (eye, self.eye_height), (zero, nose_tip(self)),
            (-self.mouth_width, self.mouth_height), (self.mouth_width, self.mouth_height),
            (zero, chin), (-ear, zero + 0.06), (ear, zero + 0.06), (brim_x, zero + HAT_Y),
        )  # fmt: skip
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


def nose_tip(c: _Canvas) -> torch.Tensor:
    """(B, 1, 1) height of the nose tip in face units."""
    return c.eye_height + 0.07 + c.nose_length


# --- shapes: signed distance in face units, negative inside ------------------------------------------------------
def _ellipse(x: torch.Tensor, y: torch.Tensor, rx: Extent, ry: Extent, power: Extent = 2.0) -> torch.Tensor:
    """First-order distance to a superellipse |x/rx|^p + |y/ry|^p = 1."""
    level = ((x / rx).abs().clamp(min=1e-6) ** power + (y / ry).abs().clamp(min=1e-6) ** power) ** (1 / power)
    return (level - 1) * torch.minimum(torch.as_tensor(rx, device=x.device), torch.as_tensor(ry, device=x.device))


def _box(x: torch.Tensor, y: torch.Tensor, hx: Extent, hy: Extent, round_: float = 0.0) -> torch.Tensor:
    qx, qy = x.abs() - hx + round_, y.abs() - hy + round_
    return torch.hypot(qx.clamp(min=0), qy.clamp(min=0)) + torch.maximum(qx, qy).clamp(max=0) - round_


def _circles(c: _Canvas, centres: list[tuple[float, float]], radius: torch.Tensor, lift: torch.Tensor) -> torch.Tensor:
    """Union of equal circles on the head's outline: curls."""
    best = torch.full_like(c.x, 9.0)
    for ax, ay in centres:
        dx, dy = c.x - ax * (c.head_width + lift), c.y - HEAD_Y - ay * (c.head_height + lift)
        best = torch.minimum(best, torch.hypot(dx, dy))
    return best - radius


_CURLS = [(-1.0, 0.25), (-1.05, -0.1), (-0.95, -0.42), (-0.72, -0.72), (-0.38, -0.93), (0.0, -1.02)]
_CURLS += [(-x, y) for x, y in _CURLS[:-1]]
_TOP_CURLS = [(-0.7, -0.62), (-0.36, -0.78), (0.0, -0.84), (0.36, -0.78), (0.7, -0.62)]


def _paint(c: _Canvas) -> None:
    _paint_behind(c)
    head = _paint_head(c)
    _paint_face(c)
    _paint_hair_front(c, head)
    _paint_glasses(c)
    _paint_hat(c)


def _paint_behind(c: _Canvas) -> None:
    page = c.palette("background", 0) * (1 + 0.12 * (-c.page_y + c.light * 3 * c.page_x))[:, None]
    c.paint("background", torch.full_like(c.x, -9.0), page)
    hair, width = c.palette("hair_color", 2), c.head_width + 0.10
    c.paint("hair", _box(c.x, c.y - 0.22, width, 0.62, 0.22), hair, c.has("hair", "long"))
    c.paint("hair", _circles(c, _CURLS, 0.115 + 0.3 * c.hair_volume, c.hair_volume * 0.4), hair, c.has("hair", "curly"))
    skin = c.palette("skin", 1)
    c.paint("skin", _box(c.x, c.y - 0.62, 0.15, 0.22), skin * 0.86)
    shirt = torch.minimum(_ellipse(c.x, c.y - 1.12, 0.74, 0.44, 2.6), _box(c.x, c.y - 1.5, 0.72, 0.45))
    c.paint("shirt", shirt, c.palette("shirt", 3))
    c.paint("skin", _ellipse(c.x, c.y - 0.69, 0.15, 0.10), skin * 0.86)


def _paint_head(c: _Canvas) -> torch.Tensor:
    skin = c.palette("skin", 1)
    for side in (-1, 1):
        ear = _ellipse(c.x - side * (c.head_width + 0.01), c.y - 0.06, c.ear_size * 0.75, c.ear_size)
        c.paint("skin", ear, skin * 0.9)
    head = _ellipse(c.x, c.y - HEAD_Y, c.head_width, c.head_height, c.jaw)
    c.paint("skin", head, skin * (1 + c.light * 0.8 * c.x)[:, None])
    hair = c.palette("hair_color", 2)
    chin = _ellipse(c.x, c.y - HEAD_Y, c.head_width + 0.015, c.head_height + 0.04, c.jaw)
    jawline = 0.29 - 0.30 * (c.x / c.head_width) ** 2 * 0.25 - c.y
    c.paint("beard", torch.maximum(chin, jawline), hair * 0.94, c.has("beard", "beard"))
    return head


def _paint_face(c: _Canvas) -> None:
    skin, hair = c.palette("skin", 1), c.palette("hair_color", 2)
    iris = torch.tensor((70, 90, 120), device=c.device).view(1, 3, 1, 1) / 255 + 0.12 * c.jitter[:, 4, :, None, None]
    for side in (-1, 1):
        ex, ey = c.x - side * c.eye_distance, c.y - c.eye_height
        c.paint("eyes", _ellipse(ex, ey, c.eye_size, c.eye_size * 0.95), (252, 252, 252))
        c.paint("eyes", torch.hypot(ex, ey) - c.eye_size * 0.62, iris)
        c.paint("eyes", torch.hypot(ex, ey) - c.eye_size * 0.36, (18, 14, 20))
        rise = ey + c.eye_size + 0.045 + c.brow_lift - side * c.brow_tilt * ex
        c.paint("hair", _box(ex, rise, 0.10, 0.022, 0.015), hair * 0.8)
    tip = nose_tip(c)
    wedge = c.nose_width * ((c.y - c.eye_height - 0.05) / (c.nose_length + 0.04)).clamp(0.25, 1)
    span = _box(c.x, c.y - (tip - c.nose_length / 2), 0.2, c.nose_length / 2)
    c.paint("nose", torch.maximum(c.x.abs() - wedge, span), skin * 0.78)
    _paint_mouth(c)
    for word, side in (("left", -1), ("right", 1)):
        spot = torch.hypot(c.x - side * 0.29, c.y - 0.20) - 0.064
        c.paint("mole", spot, (44, 18, 14), c.has("mole", word))


def _paint_mouth(c: _Canvas) -> None:
    lips = torch.tensor((178, 44, 56), device=c.device).view(1, 3, 1, 1) / 255 + 0.06 * c.jitter[:, 5, :, None, None]
    y = c.y - c.mouth_height
    bend = torch.where(c.has("mouth", "smiling"), -0.15, torch.where(c.has("mouth", "frowning"), 0.15, 0.0))
    line = y - bend * ((c.x / c.mouth_width) ** 2 - 0.5)
    # Dividing by the slope keeps the line's thickness even where it is steep.
    slope = torch.sqrt(1 + (2 * bend * c.x / c.mouth_width**2) ** 2)
    stroke = torch.maximum(line.abs() / slope - 0.046, c.x.abs() - c.mouth_width)
    c.paint("mouth", stroke, lips, ~c.has("mouth", "surprised"))
    c.paint("mouth", _ellipse(c.x, y, 0.10, 0.125), lips, c.has("mouth", "surprised"))
    c.paint("mouth", _ellipse(c.x, y, 0.055, 0.078), (60, 10, 20), c.has("mouth", "surprised"))


def _paint_hair_front(c: _Canvas, head: torch.Tensor) -> None:
    hair = c.palette("hair_color", 2)
    crown = head - c.hair_volume
    fringe = c.y + 0.26 + 0.10 * (c.x / c.head_width) ** 2 - 0.05
    sides = torch.maximum(c.head_width * 0.86 - c.x.abs(), c.y - 0.08)
    short = torch.minimum(torch.maximum(crown, fringe), torch.maximum(crown, sides))
    c.paint("hair", short, hair, c.has("hair", "short"))
    curtain = torch.maximum(c.head_width * 0.88 - c.x.abs(), c.y - 0.62)
    long = torch.minimum(torch.maximum(crown, fringe), torch.maximum(head - 0.09, curtain))
    c.paint("hair", long, hair, c.has("hair", "long"))
    top = _circles(c, _TOP_CURLS, 0.13 + c.hair_volume, c.hair_volume)
    c.paint("hair", top, hair, c.has("hair", "curly"))


def _paint_glasses(c: _Canvas) -> None:
    worn = c.has("glasses", "glasses")
    for side in (-1, 1):
        lens = torch.hypot(c.x - side * (c.eye_distance + 0.015), c.y - c.eye_height)
        c.paint("glasses", (lens - 0.15).abs() - 0.024, _INK, worn)
    bridge = _box(c.x, c.y - c.eye_height + 0.02, (c.eye_distance - 0.12).clamp(min=0.02), 0.02)
    arms = torch.maximum(_box(c.x, c.y - c.eye_height, c.head_width + 0.02, 0.018), c.eye_distance + 0.15 - c.x.abs())
    c.paint("glasses", torch.minimum(bridge, arms), _INK, worn)


def _paint_hat(c: _Canvas) -> None:
    cloth = c.palette("shirt", 3) * 0.92
    cap = c.has("hat", "cap-left", "cap-right")
    dome = torch.maximum(_ellipse(c.x, c.y - HAT_Y, c.head_width + 0.05, 0.34), c.y - HAT_Y)
    c.paint("hat", dome, cloth, cap)
    for word, side in (("cap-left", -1), ("cap-right", 1)):
        brim = _box(c.x - side * 0.42, c.y - HAT_Y + 0.01, 0.34, 0.05, 0.045)
        c.paint("hat", brim, cloth * 0.72, c.has("hat", word))
    tall = c.has("hat", "tophat")
    c.paint("hat", _box(c.x, c.y - HAT_Y + 0.32, 0.33, 0.30, 0.03), cloth, tall)
    c.paint("hat", _box(c.x, c.y - HAT_Y + 0.09, 0.335, 0.045), cloth * 0.6, tall)
    c.paint("hat", _box(c.x, c.y - HAT_Y, 0.60, 0.05, 0.045), cloth * 0.85, tall)
