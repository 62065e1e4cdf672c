"""One arm's metrics as printed by claims."""

from __future__ import annotations

from typing import Any

from ..intervals import mean_interval
from .positions import Look


def line(look: Look) -> dict[str, Any]:
    """Means with their 95 % intervals over images, for metrics per image."""
    low, high = mean_interval(look.hits)
    shown = f"{float(look.hits.mean()):.3f} ({low:.3f} to {high:.3f})"
    few, many = mean_interval(look.heads.float())
    return {
        "shown": shown,
        "heads": f"{float(look.heads.float().mean()):.2f} ({few:.2f} to {many:.2f})",
        "one head": round(float((look.heads == 1).float().mean()), 3),
        "detail": round(look.detail, 2),
        "Frechet": round(look.frechet, 1),
        "coarse error": round(float(look.coarse.mean()), 4),
    }
