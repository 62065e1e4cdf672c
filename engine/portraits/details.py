"""Details for images of 128 px or more: strands of hair, shading, cloth, catchlights.

Every detail is a deterministic function of the scene, so captions stay complete, and details only recolour existing
parts: parts and keypoints are those of the plain rendering.
"""

from __future__ import annotations

import torch

from .canvas import CURLS, HAT_Y, HEAD_Y, PARTS, Canvas, circles, nose_tip

_BUTTONS = (0.86, 0.97)


def add_details(c: Canvas) -> None:
    """Recolours a finished canvas part by part."""
    light = 1 + 0.10 * torch.exp(-((c.page_x + 0.3) ** 2 + (c.page_y + 0.5) ** 2) / 0.5) - 0.05 * c.page_y
    _shade(c, "background", light)
    _skin(c)
    _shade(c, "hair", 1 + 0.16 * _strands(c))
    _shade(c, "beard", 1 + 0.14 * torch.sin(34 * c.x + 9 * torch.sin(7 * c.y)) * torch.cos(26 * c.y))
    _cloth(c)
    _face(c)


def _shade(c: Canvas, part: str, brightness: torch.Tensor) -> None:
    """Multiplies the colour of one part by (B or 1, S, S)."""
    here = c.parts == PARTS.index(part)
    c.color = c.color * torch.where(here, brightness, 1.0)[:, None]


def _tint(c: Canvas, part: str, amount: torch.Tensor, color: tuple[int, int, int]) -> None:
    """Blends one part towards a colour by (B or 1, S, S) in [0, 1]."""
    here = torch.where(c.parts == PARTS.index(part), amount, 0.0)[:, None]
    target = torch.tensor(color, device=c.device, dtype=torch.float32).view(1, 3, 1, 1) / 255
    c.color = c.color + here * (target - c.color)


def _blob(x: torch.Tensor, y: torch.Tensor, width: float, height: float) -> torch.Tensor:
    return torch.exp(-0.5 * ((x / width) ** 2 + (y / height) ** 2))


def _skin(c: Canvas) -> None:
    """Shades the head: darker towards its outline, a lit forehead, warm cheeks, a shadow under the nose."""
    edge = ((c.x / c.head_width) ** 2 + ((c.y - HEAD_Y) / c.head_height) ** 2).clamp(max=1.6)
    _shade(c, "skin", 1.03 - 0.13 * edge**2 + 0.06 * _blob(c.x + 0.12, c.y + 0.18, 0.16, 0.10))
    for side in (-1, 1):
        _tint(c, "skin", 0.30 * _blob(c.x - side * 0.27, c.y - 0.22, 0.09, 0.07), (226, 92, 84))
    _shade(c, "skin", 1 - 0.12 * _blob(c.x, c.y - nose_tip(c) - 0.035, 0.07, 0.018))
    _shade(c, "nose", 1.16 - 0.9 * (c.x - 0.015).abs() / (c.nose_width + 0.02))


def _strands(c: Canvas) -> torch.Tensor:
    """(B, S, S) in [-1, 1]: strands run from the crown outwards; curls are rings."""
    angle = torch.atan2(c.x, c.y - HEAD_Y - 0.75)
    straight = torch.sin(46 * angle + 1.5 * torch.sin(9 * c.y))
    curls = circles(c, CURLS, torch.zeros_like(c.hair_volume), c.hair_volume * 0.4)
    return torch.where(c.has("hair", "curly"), torch.cos(58 * curls), straight)


def _cloth(c: Canvas) -> None:
    """A collar, a button row and folds on the shirt; light from the left and a ribbed crown on the hat."""
    fold = 0.06 * torch.sin(11 * c.x + 4 * c.y) + 0.05 * torch.cos(3.2 * c.x)
    _shade(c, "shirt", 1 + fold)
    opening = (c.x.abs() - 0.022).abs() < 0.5 * c.pixel
    _shade(c, "shirt", torch.where(opening & (c.y > 0.76), 0.72, 1.0))
    for at in _BUTTONS:
        _tint(c, "shirt", (0.5 - (torch.hypot(c.x, c.y - at) - 0.026) / c.pixel).clamp(0, 1) * 0.8, (252, 248, 236))
    collar = ((c.y - 0.66 - 0.62 * c.x.abs()).abs() - 0.016) / c.pixel
    _shade(c, "shirt", 1 - 0.22 * (0.5 - collar).clamp(0, 1) * (c.x.abs() < 0.34))
    rib = 0.10 * torch.cos(12 * c.x / c.head_width) * (c.y < HAT_Y - 0.05)
    _shade(c, "hat", 1 + rib - 0.22 * c.x)


def _face(c: Canvas) -> None:
    """Catchlights and a shaded upper lid in the eyes, a lit lower lip, a glint on each lens."""
    for side in (-1, 1):
        ex, ey = c.x - side * c.eye_distance, c.y - c.eye_height
        lid = ((-ey / c.eye_size - 0.45) / 0.5).clamp(0, 1)
        near = ex.abs() < c.eye_size * 1.1
        _shade(c, "eyes", 1 - 0.30 * lid * near)
        gleam = torch.hypot(ex + c.eye_size * 0.22, ey + c.eye_size * 0.26) - c.eye_size * 0.17
        _tint(c, "eyes", (0.5 - gleam / c.pixel).clamp(0, 1), (255, 255, 255))
        lens = torch.hypot(ex - side * 0.015, ey) < 0.125
        glint = ((ex + ey + 0.09).abs() < 0.022) & lens & c.has("glasses", "glasses")
        for part in ("skin", "eyes", "hair"):
            _tint(c, part, 0.42 * glint, (255, 255, 255))
    _shade(c, "mouth", 1.0 + 0.28 * _blob(c.x, c.y - c.mouth_height - 0.018, 0.09, 0.02))
