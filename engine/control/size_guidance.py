"""Guidance with a separate strength for the control (Berrada et al. 2024, Eq. 2), with few UNet evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from ..diffusion.guidance import guide
from ..errors import refuse
from ..settings.config import Config

NESTINGS = ("control_inner", "semantic_inner")
NEGATIVES = ("picture", "positive")
Key = tuple[bool, bool]
"""One evaluation of the network: (with control, with semantics)."""
Evaluate = Callable[[bool, bool], torch.Tensor]
"""(with control, with semantics) -> prediction (B, C, H, W)."""


@dataclass(frozen=True)
class GuidanceConfig(Config):
    """Strengths of Eq. 2.

    Attributes:
        scale: lambda, the guidance scale; 1 is no guidance.
        control: beta, the control's guidance scale; 1 is no guidance. The paper's best FID is at 1.375.
        nesting: ``control_inner`` is Eq. 2 of the main text, where the inner null drops the control;
            ``semantic_inner`` that of its appendix D, where it drops the semantics.
        negative: size conditioning of the unconditional half: ``picture``, its own size (no control, Eq. 2), or
            ``positive``, that of the prompt, the default of diffusers' SDXL pipeline.
        skip_below: weights gamma below this count as 0 if the high-level control is null.
    """

    scale: float = 1.0
    control: float = 1.0
    nesting: str = "control_inner"
    skip_below: float = 1e-4
    negative: str = "picture"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.control)):
            raise refuse("scale, size strength", (self.scale, self.control), "finite numbers", "1.0 is no guidance")
        if self.nesting not in NESTINGS:
            raise refuse("nesting", self.nesting, NESTINGS, "control_inner is the paper's Eq. 2")
        if self.negative not in NEGATIVES:
            raise refuse("negative", self.negative, NEGATIVES, "picture is Eq. 2's; positive is diffusers' default")
        if not 0 <= self.skip_below <= 1:
            raise refuse("skip_below", self.skip_below, "0 to 1", "1e-4 is the default; 0 never skips")

    @property
    def unconditional(self) -> Key:
        """The evaluation that the outer guidance moves away from."""
        return self.negative == "positive", False


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
    inner = _guide(lambda: eps(*inner_null), lambda: eps(True, True), config.control)
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
