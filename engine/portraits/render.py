"""The renderer: signed distances, painted back to front, with exact ground truth.

All shapes are evaluated for the whole batch at once in torch, on any device. Edges are anti-aliased over one pixel of
the *output*, so a scene stays sharp at 32, 64 or 128 px, or cropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import refuse
from .canvas import (
    CURLS,
    HAT_Y,
    HEAD_Y,
    INK,
    KEYPOINTS,
    PARTS,
    TOP_CURLS,
    Canvas,
    box,
    circles,
    ellipse,
    nose_tip,
)
from .details import add_details
from .scenes import Scenes

__all__ = ["KEYPOINTS", "PARTS", "Pictures", "render"]


@dataclass(frozen=True)
class Pictures:
    """The result of :func:`render`.

    Attributes:
        images: (B, 3, S, S) float32 in [0, 1].
        parts: (B, S, S) uint8, index into ``PARTS`` of the part at each pixel.
        keypoints: (B, 9, 2) float32, (x, y) in [0, 1] of the image; NaN if absent (hat brim) or cropped away.
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
    """Renders B scenes at ``size`` x ``size`` pixels.

    Args:
        crop: (left, top, right, bottom) of the crop, as fractions of the full image; must be square.
        flip: mirror left and right (captions must be flipped, too).
        original_size: render at this many pixels first and resize bilinearly, to lose detail like a small
            upscaled image. None renders at ``size``.
        details: add details for 128 px: strands of hair, shading of skin and cloth, and others.
    """
    _check_view(size, crop, original_size)
    drawn = original_size or size
    canvas = Canvas(scenes, drawn, crop, flip, torch.device(device))
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
        raise refuse("picture size", (size, original_size), "sizes of at least 8 px", "render larger")
    left, top, right, bottom = crop
    inside = 0 <= left < right <= 1 and 0 <= top < bottom <= 1
    if not inside or abs((right - left) - (bottom - top)) > 1e-6:
        raise refuse("crop", crop, "a square (left, top, right, bottom) inside [0, 1]", "e.g. (0.1, 0.0, 0.9, 0.8)")


def _paint(c: Canvas) -> None:
    _paint_behind(c)
    head = _paint_head(c)
    _paint_face(c)
    _paint_hair_front(c, head)
    _paint_glasses(c)
    _paint_hat(c)


def _paint_behind(c: Canvas) -> None:
    page = c.palette("background", 0) * (1 + 0.12 * (-c.page_y + c.light * 3 * c.page_x))[:, None]
    c.paint("background", torch.full_like(c.x, -9.0), page)
    hair, width = c.palette("hair_color", 2), c.head_width + 0.10
    c.paint("hair", box(c.x, c.y - 0.22, width, 0.62, 0.22), hair, c.has("hair", "long"))
    c.paint("hair", circles(c, CURLS, 0.115 + 0.3 * c.hair_volume, c.hair_volume * 0.4), hair, c.has("hair", "curly"))
    skin = c.palette("skin", 1)
    c.paint("skin", box(c.x, c.y - 0.62, 0.15, 0.22), skin * 0.86)
    shirt = torch.minimum(ellipse(c.x, c.y - 1.12, 0.74, 0.44, 2.6), box(c.x, c.y - 1.5, 0.72, 0.45))
    c.paint("shirt", shirt, c.palette("shirt", 3))
    c.paint("skin", ellipse(c.x, c.y - 0.69, 0.15, 0.10), skin * 0.86)


def _paint_head(c: Canvas) -> torch.Tensor:
    skin = c.palette("skin", 1)
    for side in (-1, 1):
        ear = ellipse(c.x - side * (c.head_width + 0.01), c.y - 0.06, c.ear_size * 0.75, c.ear_size)
        c.paint("skin", ear, skin * 0.9)
    head = ellipse(c.x, c.y - HEAD_Y, c.head_width, c.head_height, c.jaw)
    c.paint("skin", head, skin * (1 + c.light * 0.8 * c.x)[:, None])
    hair = c.palette("hair_color", 2)
    chin = ellipse(c.x, c.y - HEAD_Y, c.head_width + 0.015, c.head_height + 0.04, c.jaw)
    jawline = 0.29 - 0.30 * (c.x / c.head_width) ** 2 * 0.25 - c.y
    c.paint("beard", torch.maximum(chin, jawline), hair * 0.94, c.has("beard", "beard"))
    return head


def _paint_face(c: Canvas) -> None:
    skin, hair = c.palette("skin", 1), c.palette("hair_color", 2)
    iris = torch.tensor((70, 90, 120), device=c.device).view(1, 3, 1, 1) / 255 + 0.12 * c.jitter[:, 4, :, None, None]
    for side in (-1, 1):
        ex, ey = c.x - side * c.eye_distance, c.y - c.eye_height
        c.paint("eyes", ellipse(ex, ey, c.eye_size, c.eye_size * 0.95), (252, 252, 252))
        c.paint("eyes", torch.hypot(ex, ey) - c.eye_size * 0.62, iris)
        c.paint("eyes", torch.hypot(ex, ey) - c.eye_size * 0.36, (18, 14, 20))
        rise = ey + c.eye_size + 0.045 + c.brow_lift - side * c.brow_tilt * ex
        c.paint("hair", box(ex, rise, 0.10, 0.022, 0.015), hair * 0.8)
    tip = nose_tip(c)
    wedge = c.nose_width * ((c.y - c.eye_height - 0.05) / (c.nose_length + 0.04)).clamp(0.25, 1)
    span = box(c.x, c.y - (tip - c.nose_length / 2), 0.2, c.nose_length / 2)
    c.paint("nose", torch.maximum(c.x.abs() - wedge, span), skin * 0.78)
    _paint_mouth(c)
    for word, side in (("left", -1), ("right", 1)):
        spot = torch.hypot(c.x - side * 0.29, c.y - 0.20) - 0.064
        c.paint("mole", spot, (44, 18, 14), c.has("mole", word))


def _paint_mouth(c: Canvas) -> None:
    lips = torch.tensor((178, 44, 56), device=c.device).view(1, 3, 1, 1) / 255 + 0.06 * c.jitter[:, 5, :, None, None]
    y = c.y - c.mouth_height
    bend = torch.where(c.has("mouth", "smiling"), -0.15, torch.where(c.has("mouth", "frowning"), 0.15, 0.0))
    line = y - bend * ((c.x / c.mouth_width) ** 2 - 0.5)
    # Dividing by the slope keeps the line's thickness constant.
    slope = torch.sqrt(1 + (2 * bend * c.x / c.mouth_width**2) ** 2)
    stroke = torch.maximum(line.abs() / slope - 0.046, c.x.abs() - c.mouth_width)
    c.paint("mouth", stroke, lips, ~c.has("mouth", "surprised"))
    c.paint("mouth", ellipse(c.x, y, 0.10, 0.125), lips, c.has("mouth", "surprised"))
    c.paint("mouth", ellipse(c.x, y, 0.055, 0.078), (60, 10, 20), c.has("mouth", "surprised"))


def _paint_hair_front(c: Canvas, head: torch.Tensor) -> None:
    hair = c.palette("hair_color", 2)
    crown = head - c.hair_volume
    fringe = c.y + 0.26 + 0.10 * (c.x / c.head_width) ** 2 - 0.05
    sides = torch.maximum(c.head_width * 0.86 - c.x.abs(), c.y - 0.08)
    short = torch.minimum(torch.maximum(crown, fringe), torch.maximum(crown, sides))
    c.paint("hair", short, hair, c.has("hair", "short"))
    curtain = torch.maximum(c.head_width * 0.88 - c.x.abs(), c.y - 0.62)
    long = torch.minimum(torch.maximum(crown, fringe), torch.maximum(head - 0.09, curtain))
    c.paint("hair", long, hair, c.has("hair", "long"))
    top = circles(c, TOP_CURLS, 0.13 + c.hair_volume, c.hair_volume)
    c.paint("hair", top, hair, c.has("hair", "curly"))


def _paint_glasses(c: Canvas) -> None:
    worn = c.has("glasses", "glasses")
    for side in (-1, 1):
        lens = torch.hypot(c.x - side * (c.eye_distance + 0.015), c.y - c.eye_height)
        c.paint("glasses", (lens - 0.15).abs() - 0.024, INK, worn)
    bridge = box(c.x, c.y - c.eye_height + 0.02, (c.eye_distance - 0.12).clamp(min=0.02), 0.02)
    arms = torch.maximum(box(c.x, c.y - c.eye_height, c.head_width + 0.02, 0.018), c.eye_distance + 0.15 - c.x.abs())
    c.paint("glasses", torch.minimum(bridge, arms), INK, worn)


def _paint_hat(c: Canvas) -> None:
    cloth = c.palette("shirt", 3) * 0.92
    cap = c.has("hat", "cap-left", "cap-right")
    dome = torch.maximum(ellipse(c.x, c.y - HAT_Y, c.head_width + 0.05, 0.34), c.y - HAT_Y)
    c.paint("hat", dome, cloth, cap)
    for word, side in (("cap-left", -1), ("cap-right", 1)):
        brim = box(c.x - side * 0.42, c.y - HAT_Y + 0.01, 0.34, 0.05, 0.045)
        c.paint("hat", brim, cloth * 0.72, c.has("hat", word))
    tall = c.has("hat", "tophat")
    c.paint("hat", box(c.x, c.y - HAT_Y + 0.32, 0.33, 0.30, 0.03), cloth, tall)
    c.paint("hat", box(c.x, c.y - HAT_Y + 0.09, 0.335, 0.045), cloth * 0.6, tall)
    c.paint("hat", box(c.x, c.y - HAT_Y, 0.60, 0.05, 0.045), cloth * 0.85, tall)
