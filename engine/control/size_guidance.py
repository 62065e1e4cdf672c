"""Guidance with a strength of its own for control (Berrada et al. 2024, Eq. 2), in as few network rows as possible."""

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
        scale: lambda, the usual guidance scale; 1 is none.
        control: beta, the control's; 1 is none. The paper's best FID is at 1.375.
        nesting: ``control_inner`` is Eq. 2 of the main text, where the inner null drops the control;
            ``semantic_inner`` that of its appendix D, where it drops the semantics.
        negative: which sizes the unconditional half is told: ``picture``, its own (no control, as Eq. 2 has it), or
            ``positive``, those of the prompt, as diffusers' SDXL pipeline does unless told otherwise.
        skip_below: weights gamma under this count as none when the high-level control is null.

    Raises:
        VitrineError: The nesting is unknown, or a number is not finite.
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
        """The evaluation that the outer guidance leads away from."""
        return self.negative == "positive", False


class Guided(NamedTuple):
    """The guided prediction, and how many evaluations of the network it took."""

    prediction: torch.Tensor
    evaluations: int


class ControlStep(NamedTuple):
    """One sampling step: its timestep, sigma, weight gamma (the largest of its rows), and evaluations per picture."""

    t: float
    sigma: float
    gamma: float
    evaluations: int


def control_guidance(
    evaluate: Evaluate, config: GuidanceConfig, weight: float | torch.Tensor = 1.0, high_is_null: bool = False
) -> Guided:
    """Eq. 2 in one to three evaluations: those that can change the result.

    Args:
        evaluate: called at most once for each pair.
        weight: gamma of this step, a number or (B,).
        high_is_null: the high-level control is null, so that below ``skip_below`` eps(c, s) = eps(0, s) and the
            control needs no evaluation of its own. At gamma = 0 the result is the same bit for bit.
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
    """Guidance that does not evaluate ``null`` where it has no part in the result."""
    return full() if scale == 1 else guide(null(), full(), scale)


def needed_evaluations(config: GuidanceConfig, weight: float = 1.0, high_is_null: bool = False) -> tuple[Key, ...]:
    """The evaluations :func:`control_guidance` will ask for, to be made as one batch; the unconditional first."""
    return _needed(config, high_is_null and weight < config.skip_below)


@cache
def _needed(config: GuidanceConfig, skip: bool) -> tuple[Key, ...]:
    """Asked anew in each step of a run, and the same from step to step."""
    asked: list[Key] = []

    def note(control: bool, semantics: bool) -> torch.Tensor:
        asked.append((control, semantics))
        return torch.zeros(())

    control_guidance(note, config, 0.0 if skip else 1.0, skip)
    return tuple(sorted(asked))
