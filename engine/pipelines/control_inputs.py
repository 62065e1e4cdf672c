"""The arguments of a controlled call, made what sampling takes: sizes, guidance, and where the noise comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..condition import Condition
from ..control import GuidanceConfig, SizeCondition
from ..errors import refuse
from ..noise import generators

Sizes = SizeCondition | Sequence[SizeCondition]
Generators = torch.Generator | list[torch.Generator]


def one_each(sizes: Sizes, count: int) -> list[SizeCondition]:
    """One size condition for each picture.

    Raises:
        VitrineError: If there is another number of them.
    """
    conditions = [sizes] * count if isinstance(sizes, SizeCondition) else list(sizes)
    if len(conditions) != count:
        raise refuse("size_condition", len(conditions), f"1 or {count}", "one for each picture")
    return conditions


def guidance_of(guidance: GuidanceConfig | None, scale: float | None) -> GuidanceConfig:
    """The guidance of a call; ``guidance_scale`` is diffusers' name for its scale, 5 by default.

    Raises:
        VitrineError: If both are given.
    """
    if guidance is not None and scale is not None:
        raise refuse("guidance, guidance_scale", "both", "one of them", "the scale is a part of GuidanceConfig")
    return guidance or GuidanceConfig(scale=5.0 if scale is None else scale)


def noise_sources(
    seeds: Sequence[int] | None, generator: Generators | None, latents: torch.Tensor | None, count: int
) -> Generators | None:
    """What noise is drawn from: one generator, or one for each picture; None where the noise is given.

    Raises:
        VitrineError: If there is more than one source, or its number is not that of the pictures.
    """
    sources: dict[str, Any] = {"seeds": seeds, "generator": generator, "latents": latents}
    chosen = [name for name, value in sources.items() if value is not None]
    if len(chosen) > 1:
        raise refuse(", ".join(chosen), "all of them", "one of them", "each of them decides the noise")
    rows = range(count) if not chosen else sources[chosen[0]]
    if not isinstance(rows, torch.Generator) and len(rows) != count:
        raise refuse(chosen[0], len(rows), f"{count}, one for each picture", "repeat or remove some")
    if latents is not None:
        return None
    return generator if generator is not None else generators(range(count) if seeds is None else seeds)


def rows_of(cond: Condition) -> int:
    """Rows of a condition's text, 0 where it has none."""
    return 0 if cond.text is None else len(cond.text)
