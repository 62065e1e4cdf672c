"""Shared by control claims: prompts with their scenes, the attribute classifier, renders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...engine.portraits.scenes import Scenes
from ..portraits.readout import Reading, load_readout, read

FIRST = 7_000_000
Reader = Callable[[torch.Tensor], Reading]


def prompts_of(count: int, first: int = FIRST, brief: bool = False) -> tuple[Scenes, list[str], list[int]]:
    """Scenes, captions and seeds; brief captions omit skin, hair colour, mouth, shirt and background."""
    from ...engine.portraits import caption, sample_scenes
    from ...engine.portraits.captions import OPTIONAL

    scenes = sample_scenes(range(first, first + count))
    return scenes, caption(scenes, np.full((count, len(OPTIONAL)), brief)), list(range(count))


def reader() -> Reader:
    """Images (B, 3, H, W) -> readings of the attribute classifier."""
    net = load_readout()
    return lambda images: read(net, images)


def renders(count: int) -> torch.Tensor:
    """(count, 3, 64, 64) of scenes that are not sampled here."""
    from ...engine.portraits import render, sample_scenes

    return render(sample_scenes(range(FIRST + 10_000, FIRST + 10_000 + count))).images
