"""Guidance with a separate strength for the control (Berrada et al. 2024, Eq. 2), with few UNet evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple

import torch

from ..diffusion.guidance import guide
from ..settings.option import Option, Options

NESTINGS = ("control_inner", "semantic_inner")
NEGATIVES = ("picture", "positive")
Key = tuple[bool, bool]
"""One evaluation of the network: (with control, with semantics)."""
Evaluate = Callable[[bool, bool], torch.Tensor]
"""(with control, with semantics) -> prediction (B, C, H, W)."""


@dataclass(frozen=True)
class GuidanceConfig(Options):
    """Strengths of Eq. 2."""

    scale: Annotated[float, Option("Guidance by the prompt; 1 is none.", bottom=0, top=100, step=0.1)] = 1.0
    size_guidance: Annotated[
        float,
        Option(
            "Guidance by size, crop and flip; 1 is none, 1.375 was the paper's best. Costs a third evaluation.",
            bottom=0,
            top=10,
            step=0.025,
        ),
    ] = 1.0
    nesting: Annotated[
        str,
        Option(
            "control_inner is the paper's Eq. 2; semantic_inner the order of its appendix.",
            choices=NESTINGS,
            details="The inner null drops the size condition, or the semantics.",
        ),
    ] = "control_inner"
    skip_below: Annotated[
        float,
        Option(
            "Weights gamma below this count as 0 if the high-level control is null.",
            ge=0,
            le=1,
            node=False,
            remedy="1e-4 is the default; 0 never skips",
        ),
    ] = 1e-4
    negative_sizes: Annotated[
        str,
        Option(
            "Sizes for the negative prompt. picture: its own, as ComfyUI does; positive: those of the prompt, as "
            "diffusers' SDXL does.",
            choices=NEGATIVES,
            details="Eq. 2 has picture.",
        ),
    ] = "picture"

    @property
    def unconditional(self) -> Key:
        """The evaluation that the outer guidance moves away from."""
        return self.negative_sizes == "positive", False


class Guided(NamedTuple):
    """The guided prediction, and its number of network evaluations."""

    prediction: torch.Tensor
    evaluations: int


class ControlStep(NamedTuple):
    """One sampling step: its timestep, sigma, weight gamma (the largest of the batch), and evaluations per image."""

    t: float
    sigma: float
    gamma: float
    evaluations: int


def control_guidance(
    evaluate: Evaluate, config: GuidanceConfig, weight: float | torch.Tensor = 1.0, high_is_null: bool = False
) -> Guided:
    """Eq. 2 with one to three evaluations: only those that can change the result.

    Args:
        evaluate: called at most once per pair.
        weight: gamma of this step, a number or (B,).
        high_is_null: the high-level control is null, so that below ``skip_below`` eps(c, s) = eps(0, s) and the
            control needs no separate evaluation. At gamma = 0 the result is equal bit for bit.
    """
    predictions: dict[Key, torch.Tensor] = {}
    largest = float(weight.max()) if isinstance(weight, torch.Tensor) else weight
    skip = high_is_null and largest < config.skip_below

    def eps(control: bool, semantics: bool) -> torch.Tensor:
        key = (control and not skip, semantics)
        if key not in predictions:
            predictions[key] = evaluate(*key)
        return predictions[key]

    inner_null = (False, True) if config.nesting == "control_inner" else (True, False)
    # Berrada et al. 2024, Eq. 2: lambda [beta eps(c,s) + (1 - beta) eps(0,s)] + (1 - lambda) eps(0,0)
    inner = _guide(lambda: eps(*inner_null), lambda: eps(True, True), config.size_guidance)
    outer = inner if config.scale == 1 else guide(eps(*config.unconditional), inner, config.scale)
    return Guided(outer, len(predictions))


def _guide(null: Callable[[], torch.Tensor], full: Callable[[], torch.Tensor], scale: float) -> torch.Tensor:
    """Guidance that evaluates ``null`` only if it affects the result."""
    return full() if scale == 1 else guide(null(), full(), scale)


def needed_evaluations(config: GuidanceConfig, weight: float = 1.0, high_is_null: bool = False) -> tuple[Key, ...]:
    """The evaluations that :func:`control_guidance` needs, to be run as one batch; the unconditional first."""
    return _needed(config, high_is_null and weight < config.skip_below)


@cache
def _needed(config: GuidanceConfig, skip: bool) -> tuple[Key, ...]:
    """Cached, since every step of a run calls it."""
    asked: list[Key] = []

    def note(control: bool, semantics: bool) -> torch.Tensor:
        asked.append((control, semantics))
        return torch.zeros(())

    control_guidance(note, config, 0.0 if skip else 1.0, skip)
    return tuple(sorted(asked))
