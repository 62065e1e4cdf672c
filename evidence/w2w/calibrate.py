"""The shipped people's calibrated sliders: maps by the attribute classifier, and directions trained from pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.even_strengths import StrengthMap, with_strength_maps
from ...engine.w2w.edit.pair_slider import with_pair_slider
from ...engine.w2w.space.space import WeightSpace
from ..portraits.classifier import load_classifier
from .graded import TUNED_ON, Sitting, smaller_space
from .pair_sliders import name_of, shipped_change, train_from_pairs
from .people import LABELS, Studio, frozen, retired

TUNING_PEOPLE = 24
"""Number of the tuning people who see each slider."""


def with_pairs(
    space: WeightSpace, label: str, folder: str | Path | None = None, progress: Progress = silent
) -> WeightSpace:
    """The space with a direction for a label that is trained from pairs, under ``name_of`` the label.

    It is trained in the space of the first 400 people, where ``w2w.sliders`` measures it on the others. That space lies
    in the shipped one, so that nothing is lost on the way.

    Args:
        folder: keeps the training's state.
    """
    smaller = smaller_space()
    change = train_from_pairs(Studio(frozen()[0], smaller, load_classifier()), label, folder, progress=progress)
    flat = smaller.scale * (change @ smaller.components.float())
    coefficients = (flat / space.scale) @ space.components.float().T
    return with_pair_slider(space, name_of(label), coefficients)


def calibrated(
    space: WeightSpace, labels: Sequence[str] = tuple(LABELS), people: int = TUNING_PEOPLE, steps: int = 10,
    progress: Progress = silent,
) -> WeightSpace:  # fmt: skip
    """The shipped space, with inert sliders retired, with maps of these labels' directions, those from pairs too.

    The maps are fitted on people who tune.
    """
    space = retired(space)
    studio = Studio(frozen()[0], space, load_classifier())
    for i, label in enumerate(labels):
        sitting = Sitting.open(studio, label, TUNED_ON, people, steps)
        maps = {label: sitting.tuned().whole}
        change = shipped_change(space, label)
        if change is not None:
            fitted, at_1 = sitting.tuned(change).whole, space.info["pair_sliders"][name_of(label)]
            maps[name_of(label)] = StrengthMap(tuple(at_1 * s for s in fitted.strengths), fitted.start)
        space = with_strength_maps(space, maps)
        progress(i + 1, len(labels), None)
    return space
