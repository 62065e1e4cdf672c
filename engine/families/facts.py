"""Parts of a family's record: time, sizes, published models, unsupported methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

TimeInput = Literal["timestep", "s", "1 - s", "1000 s"]
"""What diffusers pipelines pass as the timestep: the scheduler's timestep, or the flow time s in some unit."""


@dataclass(frozen=True)
class TimeEmbedding:
    """Where a backbone embeds its timestep, to which a control embedding is added.

    Attributes:
        width: backbone -> D, the width of the embedding.
        paths: backbone -> the modules whose output (B, D) it is; empty if ComfyUI's ``emb_patch`` reaches it.
    """

    width: Callable[[Any], int]
    paths: Callable[[Any], Sequence[str]] = lambda net: ()


@dataclass(frozen=True)
class SizeInput:
    """Where a backbone takes the image size.

    Attributes:
        path: of the MLP that embeds it.
        embed: the backbone's own sinusoids of sizes, (2,) -> (2, channels).
        size, target: channels of the MLP's input for (height, width) of the original and of the target size;
            None if the MLP reads one number per row, or no target size.
        check: raises if a forward's arguments lack the sizes.
    """

    path: str
    embed: Callable[[torch.Tensor], torch.Tensor]
    size: slice | None = None
    target: slice | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda arguments: None


@dataclass(frozen=True)
class Published:
    """A published model of a family, as LoRA files and student presets distinguish it.

    Attributes:
        name: display name.
        text: width of its text states, if that distinguishes models of the family.
        width: width of its blocks, if that distinguishes them.
        presets: further names in student presets.
        config: its class among ComfyUI's ``supported_models``.
        side: side of its training images in pixels, if ComfyUI's network does not have it; for a class whose models
            predict noise or v, (side for noise, side for v).
        sized: it has size conditioning.
        other: backbone of the family -> what it is instead of this model, "" if it may be this model.
    """

    name: str
    text: int = 0
    width: int = 0
    presets: tuple[str, ...] = ()
    config: str = ""
    side: tuple[int, int] | None = None
    sized: bool = False
    other: Callable[[Any], str] = lambda net: ""


class Refusal(NamedTuple):
    """Why a family does not support a method in one library, what is accepted, and the remedy."""

    why: str
    accepted: str
    remedy: str


Turn = Callable[[torch.Tensor, Sequence[int], Any], tuple[torch.Tensor, float]]
"""(positions (..., axes), widths of the axes, their base or bases) -> (angles (..., sum of widths / 2), factor)."""
RopeReader = Callable[[Any, Mapping[str, Any], Turn], Any]
"""(rotary embedding, its arguments by name, turn) -> what its forward returns, for those angles."""
