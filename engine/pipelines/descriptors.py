"""CLIP's descriptors of pictures, from a folder that the user has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ..io.files import named


def clip_descriptor(folder: str | Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Picture embeddings (n, D) of (n, 3, H, W) in [0, 1], by the vision part of a CLIP model.

    Args:
        folder: of a transformers model with ``model.safetensors``; nothing is downloaded.
    """
    from transformers import CLIPVisionModelWithProjection

    with named(folder, "CLIP folder", "a CLIP vision model of transformers, as safetensors", "check the folder"):
        model = CLIPVisionModelWithProjection.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True
        ).eval()
    side = model.config.image_size
    # Radford et al. 2021: the statistics of CLIP's training pictures
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ([0.4815, 0.4578, 0.4082], [0.2686, 0.2613, 0.2758]))

    @torch.no_grad()
    def describe(pictures: torch.Tensor) -> torch.Tensor:
        small = F.interpolate(pictures.float().cpu(), (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        embeds: torch.Tensor = model(pixel_values=(small - mean) / std).image_embeds
        return embeds

    return describe
