"""Claims about W2W on the people of the portraits world: ``vitrine reproduce 'w2w.*'``."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.portraits.flow import FLOW_WEIGHTS
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.space.space import WeightSpace
from ..intervals import mean_interval
from ..registry import ClaimResult, Curves, Table, claim
from . import avataaars_claims as _avataaars  # noqa: F401  registers w2w.sliders.avataaars
from .concept_sliders import SliderConfig
from .drawing import EDIT_STEPS, WORDS
from .edits import EditStand, baseline_sliders, compare, edit_rows
from .graded import smaller_space
from .likeness import PLAIN_PROMPT, Sitters, likeness_arms
from .people import DIRECTION_COMPONENTS, PAPER, STEPS, Studio, people_space
from .spaces import measure_directions, measure_sampling

QUICK_LABEL = "glasses"
"""The attribute whose edits ``quick`` measures; the whole claim measures all of ``WORDS``."""
FLOW_STEPS = 10
"""Sampler steps of every picture of the flow portraits."""


@claim(
    "w2w.sampling",
    paper=PAPER,
    figure="section 4.2: sampled models are consistent, new, and vary as the training set",
    target="95 % of within below 95 % of between; none nearer to a training model than 95 % of these to each other; "
    "attribute rates within 10 points of the training set's",
    minutes=4,
    quick_minutes=1.1,
)
def sampling(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """50 sampled models, 6 pictures each, in the same contexts; quick: 12 models, 3 pictures."""
    models, pictures = (12, 3) if quick else (50, 6)
    # 95 % of the error of a share of 3 ``models`` people, which the whole claim's target already allows for
    tolerance = 0.10 + (1 / math.sqrt(3 * models) if quick else 0.0)
    return measure_sampling(Studio.open(model), models, pictures, tolerance, progress)


@claim(
    "w2w.directions",
    paper=PAPER,
    figure="Fig. 9: linear directions in weight space tell attributes apart",
    target="held-out accuracy >= 90 % for every attribute of LABELS",
    minutes=0.1,
    quick_minutes=0.05,
)
def directions(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Five-fold accuracy of each label's direction, and how much directions share; quick is the same."""
    return measure_directions(people_space(), DIRECTION_COMPONENTS)


@claim(
    "w2w.editing",
    paper=PAPER,
    figure="Table 1: edits against prompts and concept sliders",
    target="for 6 attributes or more: target +60 points monotonically, others <= 10 points, identity above both "
    "baselines, the prompt as it is written",
    minutes=38,
    quick_minutes=0.9,
)
def editing(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Sweeps on 40 people of no space who lack the attribute; baselines on the same people, seeds and surroundings.

    The space and its directions come from the first 400 people; 24 of these say where a slider ends and from which
    timestep it acts, and concept sliders act from there too; prompts from the first step on.
    Identity (the paper's ID), others and pixels (its LPIPS), target (its CLIP).

    Quick: ``QUICK_LABEL`` on 10 people, after 6 others, and half of the concept slider's training. One
    person is 10 points of a share, so others may change by two standard errors more; 6 of 13 attributes become this 1.
    """
    studio = Studio.open(model, smaller_space())
    denoiser = Denoiser.from_diffusers(studio.portraits.pipeline())
    chosen, people, tuning, needed = ((QUICK_LABEL,), 10, 6, 1) if quick else (tuple(WORDS), 40, 24, 6)
    config = SliderConfig(steps=100) if quick else SliderConfig()
    tolerance = 0.10 + (2 * math.sqrt(0.10 * 0.90 / people) if quick else 0.0)
    sliders, start = baseline_sliders(studio, denoiser, chosen, config, progress)
    details: dict[str, Any] = {}
    good, harder = list[str](), list[str]()
    for i, label in enumerate(chosen):
        stand = EditStand.open(studio, label, people, tuning)
        sweeps = stand.w2w(), stand.prompt(), stand.slider(sliders[i], start)
        details[label], holds, holds_weighted = compare(*sweeps, tolerance)
        good, harder = good + [label] * holds, harder + [label] * holds_weighted
        progress(i + 1, len(chosen), None)
    rows = edit_rows(details, ("w2w", "slider", "prompt", "prompt, weighted"))
    details |= {"all conditions": good, "with the prompt's word weighted to the same rise": harder}
    head = ("attribute", "ours", "concept slider", "word in the prompt", "word, weighted")
    return ClaimResult(
        len(good),
        None,
        len(good) >= needed,
        details,
        n=people,
        parts={label: label in good for label in chosen},
        tables=(Table("At the same rise", head, rows),),
    )


@claim(
    "w2w.inversion",
    paper=PAPER,
    figure="Table 2: one picture against trained LoRAs; Figs. 10 and 30: trends",
    target="identity >= 90 % of a LoRA trained on 20 pictures, above a LoRA trained on the one picture",
    minutes=30,
    quick_minutes=1.1,
)
def inversion(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """32 people of no space: inversion, LoRA on 20 pictures, LoRA on one; on 8 fewer components, and other styles.

    Judged with one prompt for every picture, as in the paper ("sks person"). Next to it, prompts that say what is shown
    around the person, which the portraits world alone can give; there one picture is enough for a LoRA too.

    Quick: 2 people, one prompt for every picture, no trends.
    """
    studio = Studio.open(model, steps=EDIT_STEPS if quick else STEPS)
    everyone = Sitters.open(studio, 2 if quick else 32)
    judged = everyone.three_ways(PLAIN_PROMPT)
    sitters = everyone.first(8)
    progress(1, 1 if quick else 4, None)
    details: dict[str, Any] = {"one prompt for all": _described(judged)}
    ours, many, one_picture = judged.values()
    for name, other in list(judged.items())[1:]:
        low, high = mean_interval(ours.scores - other.scores)  # the same people in both
        details[f"inversion less {name}"] = f"{ours.mean - other.mean:+.3f} ({low:+.3f} to {high:+.3f})"
    plots: tuple[Curves, ...] = ()
    if not quick:
        with_captions = sitters.three_ways(None)
        details["surroundings in the prompt"] = _described(with_captions)
        progress(2, 4, None)
        details["the mean model"] = round(sitters.likeness_of(torch.zeros(len(sitters.who), studio.space.dimension)), 3)
        trend = sitters.by_components()
        trend[studio.space.dimension] = round(with_captions["inversion, 1 picture"].mean, 3)
        details["by number of components"] = {str(k): v for k, v in trend.items()}
        progress(3, 4, None)
        details["another drawing style (gray, inked edges)"] = sitters.in_another_style()
        lines = {"inversion of one picture": _logarithmic(trend)}
        level = with_captions["LoRA, 20 pictures"].mean
        lines["LoRA of 20 pictures"] = [(x, level) for x, _ in lines["inversion of one picture"]]
        plots = (Curves("Inversion by number of components", "components, log10", "identity", lines),)
    holds = ours.mean >= 0.9 * many.mean and ours.mean > one_picture.mean
    return ClaimResult(
        round(ours.mean / many.mean, 3), None, holds, details, plots, likeness_arms(judged), len(everyone.who)
    )


def _described(ways: dict[str, Any]) -> dict[str, str]:
    return {name: way.described() for name, way in ways.items()}


@claim(
    "w2w.inversion.flow",
    paper=PAPER,
    figure="w2w.inversion on the flow model: one picture against trained LoRAs",
    target="identity above that of a LoRA trained on the one picture, 95 % interval of the difference over people "
    "above 0, one prompt for every picture",
    minutes=6,
    quick_minutes=0.9,
)
def inversion_flow(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """8 people of no space: inversion, LoRA on 20 pictures, LoRA on one; and with prompts that say the surroundings.

    Inversions are made as on the 64 px model; on three other people and a space of 96 a rate of 2, a prior of 3e-3 and
    40 components came to no more (0.40, 0.44 and 0.40, against 0.44).

    Quick: 2 people, one prompt for every picture.
    """
    studio = Studio.open(model or str(FLOW_WEIGHTS), steps=FLOW_STEPS)
    assert isinstance(studio.space, WeightSpace)
    sitters = Sitters.open(studio, 2 if quick else 8)
    judged = sitters.three_ways(PLAIN_PROMPT)
    ours, many, single = judged.values()
    low, high = mean_interval(ours.scores - single.scores)
    details: dict[str, Any] = {"one prompt for all": {name: way.described() for name, way in judged.items()}}
    details["inversion less LoRA, 1 picture"] = f"{ours.mean - single.mean:+.3f} ({low:+.3f} to {high:+.3f})"
    low_many, high_many = mean_interval(ours.scores - many.scores)
    details["inversion less LoRA, 20 pictures"] = f"{ours.mean - many.mean:+.3f} ({low_many:+.3f} to {high_many:+.3f})"
    details["the mean model"] = round(sitters.likeness_of(torch.zeros(len(sitters.who), studio.space.dimension)), 3)
    progress(1, 2, None)
    if not quick:
        worded = sitters.three_ways(None)
        held = studio.space.decode(studio.space.encode(sitters.trained(20)[0]))
        details["LoRA, 20 pictures, as the space holds it"] = round(float(sitters.likeness(held).mean()), 3)
        details["surroundings in the prompt"] = {name: way.described() for name, way in worded.items()}
        first, _, last = worded.values()
        low_worded, high_worded = mean_interval(first.scores - last.scores)
        details["inversion less LoRA, 1 picture, surroundings in the prompt"] = (
            f"{first.mean - last.mean:+.3f} ({low_worded:+.3f} to {high_worded:+.3f})"
        )
    progress(2, 2, None)
    return ClaimResult(
        round(ours.mean - single.mean, 3), (low, high), low > 0, details, arms=likeness_arms(judged), n=len(sitters.who)
    )


def _logarithmic(points: dict[int, float]) -> list[tuple[float, float]]:
    return [(math.log10(x), y) for x, y in points.items()]
