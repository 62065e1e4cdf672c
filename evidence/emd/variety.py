"""Methods that restore a student's variety, at equal network calls: its pictures by each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.emd import (
    Base,
    FirstSteps,
    StudentSampling,
    few_steps,
    noisy_text,
)
from ...engine.network.condition import Condition
from ...engine.portraits import caption
from ...engine.portraits.captions import OPTIONAL
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress
from ..portraits.sampling import decode

STUDENT_ALONE, WITH_BASE = "student, 4 steps", "base for 1 of 4 steps"
TEACHER = "teacher, 10 steps, guidance 3"
SEEDS = 8


def open_captions(scenes: Scenes) -> list[str]:
    """Captions that do not mention skin, hair colour, mouth, shirt and background, like some training captions."""
    import numpy as np

    return caption(scenes, np.ones((len(scenes), len(OPTIONAL)), bool))


@dataclass
class Drawn:
    """Pictures of several prompts, each with the same seeds, by sampling method.

    Attributes:
        scenes: one for each prompt: what its pictures should show.
        pictures: name -> (prompts, seeds, 3, S, S) in [0, 1].
        calls: name -> network calls a picture.
    """

    scenes: Scenes
    pictures: dict[str, torch.Tensor]
    calls: dict[str, int]


Ways = dict[str, tuple[int, Callable[[], torch.Tensor]]]
"""Name of a sampling method -> network calls a picture, and the method: latents of all pictures."""


def four_step_ways(
    student: Denoiser,
    base: Denoiser,
    cond: Condition,
    z: torch.Tensor,
    sampling: StudentSampling,
    strengths: tuple[float, ...],
) -> Ways:
    """The student alone, with its base for one step and two, with noise on the text; ``SEEDS`` rows a prompt."""
    prompts = len(z) // SEEDS
    seeds = list(range(SEEDS)) * prompts
    ways: Ways = {STUDENT_ALONE: (4, partial(few_steps, student, z, cond, sampling, seeds))}
    for count in (1, 2):
        begun = Base(base, cond, FirstSteps(count))
        ways[f"base for {count} of 4 steps"] = (4, partial(few_steps, student, z, cond, sampling, seeds, begun))
    for strength in strengths:
        noisy = noisy_text(cond, strength, own_seeds(prompts))
        ways[f"noise on the text, {strength}"] = (4, partial(few_steps, student, z, noisy, sampling, seeds))
    return ways


def own_seeds(prompts: int) -> list[int]:
    """Separate seeds for each picture."""
    return [s + 1000 * p for p in range(prompts) for s in range(SEEDS)]


def drawn_by(ways: Ways, model: Any, scenes: Scenes, progress: Progress) -> Drawn:
    """The pictures of each method."""
    drawn = Drawn(scenes, {}, {})
    for done, (name, (calls, sample)) in enumerate(ways.items()):
        images = decode(model, sample())
        drawn.pictures[name] = images.view(len(scenes), SEEDS, *images.shape[1:])
        drawn.calls[name] = calls
        progress(done + 1, len(ways), None)
    return drawn
