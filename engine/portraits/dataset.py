"""What a toy dataset consists of: attributes, captions, drawing, memorized pictures. The portraits are one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .captions import OPTIONAL, caption, context_caption, vocabulary
from .plants import Plant, plants
from .render import KEYPOINTS, PARTS, Pictures, render
from .scenes import ATTRIBUTE_NAMES, ATTRIBUTES, IDENTITY_ATTRIBUTES, Scenes, sample_scenes


@dataclass(frozen=True)
class Dataset:
    """A dataset of drawn faces, from which a model like the portraits is trained and on which it is measured.

    Attributes:
        name: of the model's folder.
        attributes: attribute -> its values in words.
        identity: attributes that belong to a person; the others change from picture to picture.
        optional: attributes that captions sometimes omit.
        parts, keypoints: of :class:`Pictures`; part 0 is the background.
        vocabulary: the words of captions.
        sample_scenes: identity seeds, context seeds (by default the same) -> scenes.
        caption: scenes, (B, len(optional)) what to omit -> captions.
        context_caption: scenes -> captions that say nothing of who it is.
        render: scenes, side in pixels -> pictures.
        plants: the memorized pictures.
        shown: (B, A) codes -> (B, A) bool, which attributes can be seen.
        made_of: what the pictures depend on besides the code; a training on other pictures does not resume.
    """

    name: str
    attributes: Mapping[str, tuple[str, ...]]
    identity: tuple[str, ...]
    optional: tuple[str, ...]
    parts: tuple[str, ...]
    keypoints: tuple[str, ...]
    vocabulary: tuple[str, ...]
    sample_scenes: Callable[..., Scenes]
    caption: Callable[..., list[str]]
    context_caption: Callable[[Scenes], list[str]]
    render: Callable[..., Pictures]
    plants: Callable[[], list[Plant]]
    shown: Callable[[torch.Tensor], torch.Tensor]
    made_of: Any = None


def shown_mask(attributes: torch.Tensor) -> torch.Tensor:
    """(B, 10) bool: which attributes can be seen at all. A bald head shows no hair colour."""
    shown = torch.ones_like(attributes, dtype=torch.bool)
    bald = attributes[:, ATTRIBUTE_NAMES.index("hair")] == ATTRIBUTES["hair"].index("bald")
    shown[:, ATTRIBUTE_NAMES.index("hair_color")] = ~bald
    return shown


PORTRAITS = Dataset(
    "portraits", ATTRIBUTES, IDENTITY_ATTRIBUTES, OPTIONAL, PARTS, KEYPOINTS, tuple(vocabulary()), sample_scenes,
    caption, context_caption, render, plants, shown_mask,
)  # fmt: skip
"""The dataset of the shipped models."""
