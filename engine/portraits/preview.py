"""Live previews by a linear map from latent channels to colours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ..io.files import write_json

PREVIEW = "latent_rgb.json"
"""File in a model's folder: {"factors": a row (r, g, b) per channel, "bias": (r, g, b)}."""
_PICTURES = 64


def fit_preview(latents: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares from (B, C, h, w) latents to (B, 3, H, W) images in [-1, 1], averaged to h x w.

    Returns:
        Factors (C, 3) and bias (3,).
    """
    rows = latents.movedim(1, -1).flatten(0, 2).double()
    factor = images.shape[-1] // latents.shape[-1]
    colours = F.avg_pool2d(images, factor).movedim(1, -1).flatten(0, 2).double()
    design = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    solution = torch.linalg.lstsq(design, colours).solution.float()
    return solution[:-1], solution[-1]


@torch.no_grad()
def write_preview(folder: str | Path, model: Any) -> Path:
    """Fits to renders of a ``Portraits`` or ``FlowPortraits``, and writes ``latent_rgb.json`` into its folder."""
    pictures = model.draw(model.dataset.sample_scenes(range(_PICTURES))).to(model.vae.device) * 2 - 1
    latents = model.vae.encode(pictures).latent_dist.mean * model.vae.config.scaling_factor  # in the network's scale
    factors, bias = fit_preview(latents, pictures)
    table = {"factors": [[round(v, 5) for v in row] for row in factors.tolist()], "bias": bias.tolist()}
    return write_json(Path(folder) / PREVIEW, table)


def read_preview(folder: str | Path) -> tuple[list[list[float]] | None, list[float] | None]:
    """(factors, bias) of a model's folder; (None, None) if it has none."""
    path = Path(folder) / PREVIEW
    if not path.is_file():
        return None, None
    table = json.loads(path.read_text())
    return table["factors"], table["bias"]
