"""The parts of a family's record that methods read: its time, its sizes, its published models, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

TimeInput = Literal["timestep", "s", "1 - s", "1000 s"]
"""What diffusers' pipelines tell a network as its time: the scheduler's own timestep, or a flow's time s in units."""


@dataclass(frozen=True)
class TimeEmbedding:
    """Where a backbone embeds its timestep, to which a control embedding is added.

    Attributes:
        width: backbone -> D, the width of the embedding.
        paths: backbone -> the modules whose output (B, D) it is; none where ComfyUI's ``emb_patch`` reaches it.
        in_blocks: each block embeds the timestep itself, so gradient checkpointing recomputes it after hooks are gone.
    """

    width: Callable[[Any], int]
    paths: Callable[[Any], Sequence[str]] = lambda net: ()
    in_blocks: bool = False


@dataclass(frozen=True)
class SizeInput:
    """Where a backbone takes the picture's size.

    Attributes:
        path: of the MLP that embeds it.
        embed: the backbone's own sinusoids of sizes, (2,) -> (2, channels).
        size, target: channels of the MLP's input that hold (height, width) of the original and of the wanted picture;
            None where the MLP reads one number a row, or no wanted size.
        check: raises where a forward's arguments lack the sizes.
    """

    path: str
    embed: Callable[[torch.Tensor], torch.Tensor]
    size: slice | None = None
    target: slice | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda arguments: None


@dataclass(frozen=True)
class Published:
    """A published model of a family, as LoRA files and students' presets tell it apart.

    Attributes:
        name: how it is called.
        text: width of the text states that it reads, where models of the family are told apart by that.
        width: width of its blocks, where they are told apart by that.
        presets: further names that presets of students have for it.
        config: its class among ComfyUI's ``supported_models``.
        side: pixels on a side of its training pictures, where ComfyUI's network does not say; of a class whose models
            predict noise or v, (of those that predict noise, of those that predict v).
        sized: it is told the picture's size.
        other: backbone of the family -> what it is instead of this model, "" where nothing speaks against it.
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
    """Why a method cannot be done on a family in one library, what is accepted, and what to do."""

    why: str
    accepted: str
    remedy: str


Turn = Callable[[torch.Tensor, Sequence[int], Any], tuple[torch.Tensor, float]]
"""(positions (..., axes), widths of the axes, their base or bases) -> (angles (..., sum of widths / 2), factor)."""
RopeReader = Callable[[Any, Mapping[str, Any], Turn], Any]
"""(rotary embedding, its arguments by name, turn) -> what its forward returns, turned by those angles."""
