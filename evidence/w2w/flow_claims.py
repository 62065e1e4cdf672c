"""W2W on the flow model, whose people are LoRAs of joint attention: ``vitrine reproduce 'w2w.*.flow'``.

All of the space's people ship in one file. Edits come from the space of the first ``IN_SPACE`` of them, their lengths
from the last ``TUNING`` of these, and are measured on the people after them, who are in neither.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ...engine.portraits.flow import FLOW_WEIGHTS
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.space.space import WeightSpace
from ..intervals import mean_interval
from ..registry import ClaimResult, Table, claim
from .edits import WORD_WEIGHTS, Sweep, edit_rows, measure_sweep, measured_at
from .graded import Sitting, space_of_first
from .likeness import BARE, Sitters, likeness_arms
from .people import PAPER, Studio, flow_people_space
from .spaces import measure_directions, measure_sampling

STEPS = 10
"""Sampler steps of every picture here."""
IN_SPACE, TUNING = 208, 100
EDITED, QUICK_EDITED = ("glasses", "beard", "long hair", "bald", "dark skin", "mole left"), ("glasses",)
"""Attributes whose edits are measured, named before any was tried."""
STRENGTHS = (0.0, 1.5, 3.0, 4.5, 6.0)
"""Among which a slider's end is chosen on the tuning people: where the attribute has risen by 90 % of its most."""


@lru_cache(maxsize=1)
def first_people() -> WeightSpace:
    """The space of the first ``IN_SPACE`` people of the shipped one, with directions."""
    return space_of_first(flow_people_space(), IN_SPACE)


def studio_of(model: str | None, space: WeightSpace) -> Studio:
    """The flow model, drawing people of a space."""
    opened = Studio.open(model or str(FLOW_WEIGHTS), space)
    return Studio(opened.portraits, space, opened.classifier, STEPS)


@claim(
    "w2w.sampling.flow", paper=PAPER, figure="w2w.sampling on the flow model: sampled models are consistent and new",
    target="95 % of within below 95 % of between; none nearer to a training model than 95 % of these to each other; "
           "attribute rates within 20 points of the training set's",
    minutes=2, quick_minutes=0.2,
)  # fmt: skip
def sampling(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """32 sampled models, 4 pictures each, and shares of 96; the paper's Gaussian samples and training LoRAs.

    Quick: 4 models, 3 pictures, shares of 12 within 40 points.
    """
    models, pictures, tolerance = (4, 3, 0.40) if quick else (32, 4, 0.20)
    return measure_sampling(studio_of(model, flow_people_space()), models, pictures, tolerance, progress)


@claim(
    "w2w.directions.flow", paper=PAPER, figure="w2w.directions on the flow model",
    target="held-out accuracy >= 90 % for every attribute of LABELS",
    minutes=0.1, quick_minutes=0.05,
)  # fmt: skip
def directions(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Five-fold accuracy of each label's direction, and of directions for shuffled labels; quick is the same."""
    return measure_directions(flow_people_space())


@claim(
    "w2w.editing.flow", paper=PAPER, figure="w2w.editing on the flow model: people of neither the space nor the tuning",
    target="for 3 of 6 attributes: target +60 points, never falling, others <= 10 points, identity above the "
    "attribute's word in the prompt as it is written",
    minutes=6, quick_minutes=0.3,
)  # fmt: skip
def editing(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Sliders and the attribute's word at five strengths on 24 held-out people, one picture and prompt each.

    Edits act from the first step on. Another seed without any edit shows what chance changes in others. Quick:
    ``QUICK_EDITED`` on 6 people,
    of whom others may change by two standard errors more.
    """
    studio, chosen, people = studio_of(model, first_people()), QUICK_EDITED if quick else EDITED, 6 if quick else 24
    tolerance = 0.10 + (2 * math.sqrt(0.10 * 0.90 / people) if quick else 0.0)
    details, good, harder = dict[str, Any](), list[str](), list[str]()
    for done, label in enumerate(chosen):
        details[label], holds, holds_weighted = _edited(studio, label, people, tolerance)
        good, harder = good + [label] * holds, harder + [label] * holds_weighted
        progress(done + 1, len(chosen), None)
    rows = edit_rows(details, ("rise, 95 % over people", "others at +60", "w2w", "prompt", "prompt, weighted"))
    details |= {"all conditions": good, "with the prompt's word weighted to the same rise": harder}
    head = ("attribute", "rise", "others at +60", "ours", "word in the prompt", "word, weighted")
    return ClaimResult(
        len(good), None, len(good) >= len(chosen) / 2, details, n=people,
        parts={label: label in good for label in chosen}, tables=(Table("At the same rise", head, rows),),
    )  # fmt: skip


def end_of(studio: Studio, label: str, people: int) -> float:
    """The strength at which a slider ends: of ``STRENGTHS``, read on that many of the tuning people."""
    tuning = Sitting.of(studio, flow_people_space(), label, range(IN_SPACE - TUNING, IN_SPACE), people, STEPS)
    seen = tuning.graded(tuning.moved, STRENGTHS).mean
    rises = [v - seen[0] for v in seen]
    return next(s for s, rise in zip(STRENGTHS[1:], rises[1:], strict=True) if rise >= 0.9 * max(rises[1:]))


def held_out(studio: Studio, label: str, people: int) -> Sitting:
    """So many people who lack an attribute, of neither the space nor the tuning."""
    shipped = flow_people_space()
    return Sitting.of(studio, shipped, label, range(IN_SPACE, shipped.count), people, STEPS)


def _edited(studio: Studio, label: str, people: int, tolerance: float) -> tuple[dict[str, Any], bool, bool]:
    """The table of one attribute, whether the edit passes, and whether it does against weighted words too."""
    top, sitting = end_of(studio, label, people), held_out(studio, label, people)
    strengths = [top * i / 4 for i in range(5)]
    pictures = [sitting.moved(s) for s in strengths]
    own = measure_sweep(studio, label, strengths, pictures)
    word = measure_sweep(studio, label, WORD_WEIGHTS, [sitting.worded(w) for w in WORD_WEIGHTS])
    before, after = (studio.likelihood(studio.read(p)[1], label).mean(1) for p in (pictures[0], pictures[-1]))
    return _compared(own, word, mean_interval(after - before), sitting.chance(), tolerance)


def _compared(
    own: Sweep, word: Sweep, rise: tuple[float, float], chance: float, tolerance: float
) -> tuple[dict[str, Any], bool, bool]:  # fmt: skip
    """Slider and word where both have risen by 60 points, or as far as the weaker reaches; the word as written too."""
    common = max(0.05, min(0.6, own.rise, word.rise))
    ours, weighted, at_60 = own.at(common), word.at(common), own.at(0.6)
    written = word.identity[-1], word.others[-1], word.pixels[-1]
    steady = all(b >= a - 0.01 for a, b in zip(own.target, own.target[1:], strict=False))
    holds = steady and at_60 is not None and at_60[1] <= tolerance and at_60[0] > written[0]
    harder = holds and (weighted is None or ours is None or ours[0] > weighted[0])
    table = {
        "target by strength": [round(v, 3) for v in own.target],
        "strengths": list(own.strengths),
        "rise, 95 % over people": f"{own.rise:+.3f} ({rise[0]:+.3f} to {rise[1]:+.3f})",
        "others at +60": "-" if at_60 is None else f"{at_60[1]:.3f} (most: {own.other})",
        "others without any edit, by another seed": round(chance, 3),
        "w2w": "-" if ours is None else measured_at(ours, common),
        "w2w at its end": measured_at((own.identity[-1], own.others[-1], own.pixels[-1]), own.rise),
        "prompt": measured_at(written, word.rise),
        "prompt, weighted": "-" if weighted is None else measured_at(weighted, common),
    }
    return table, holds, harder


@claim(
    "w2w.inversion.flow", paper=PAPER, figure="w2w.inversion on the flow model: one picture against trained LoRAs",
    target="identity above that of a LoRA trained on the one picture, 95 % interval of the difference over people "
    "above 0, one prompt for every picture",
    minutes=6, quick_minutes=0.9,
)  # fmt: skip
def inversion(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """8 people of no space: inversion, LoRA on 20 pictures, LoRA on one; and with prompts that say the surroundings.

    Inversions are made as on the 64 px model; on three other people and a space of 96 a rate of 2, a prior of 3e-3 and
    40 components came to no more (0.40, 0.44 and 0.40, against 0.44).

    Quick: 2 people, one prompt for every picture.
    """
    studio = studio_of(model, flow_people_space())
    assert isinstance(studio.space, WeightSpace)
    sitters = Sitters.open(studio, 2 if quick else 8)
    judged = sitters.three_ways(BARE)
    ours, many, single = judged.values()
    low, high = mean_interval(ours.scores - single.scores)
    details: dict[str, Any] = {"one prompt for all": {name: way.described() for name, way in judged.items()}}
    details["inversion less LoRA, 1 picture"] = f"{ours.mean - single.mean:+.3f} ({low:+.3f} to {high:+.3f})"
    low_many, high_many = mean_interval(ours.scores - many.scores)
    details["inversion less LoRA, 20 pictures"] = (
        f"{ours.mean - many.mean:+.3f} ({low_many:+.3f} to {high_many:+.3f})"
    )  # fmt: skip
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
