"""Shared by control claims: prompts with their scenes, the attribute classifier, renders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.scenes import Scenes
from ..portraits.classifier import AttributeClassifier, Reading, load_classifier, read

FIRST_SCENE = 7_000_000
Reader = Callable[[torch.Tensor], Reading]


def prompts_of(
    count: int, first: int = FIRST_SCENE, brief: bool = False, dataset: Dataset = PORTRAITS
) -> tuple[Scenes, list[str], list[int]]:
    """Scenes, captions and seeds; brief captions omit what captions may omit, such as skin and background."""
    scenes = dataset.sample_scenes(range(first, first + count))
    return scenes, dataset.caption(scenes, np.full((count, len(dataset.optional)), brief)), list(range(count))


def reader(net: AttributeClassifier | None = None) -> Reader:
    """Images (B, 3, H, W) -> readings of an attribute classifier, by default the shipped one."""
    classifier = net or load_classifier()
    return lambda images: read(classifier, images)


def renders(count: int, dataset: Dataset = PORTRAITS) -> torch.Tensor:
    """(count, 3, 64, 64) of scenes that are not sampled here."""
    return dataset.render(dataset.sample_scenes(range(FIRST_SCENE + 10_000, FIRST_SCENE + 10_000 + count))).images
