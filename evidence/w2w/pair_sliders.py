"""Sliders of the portraits trained from pairs: renders of one person at one position, with and without an attribute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.portraits.shipped import PEOPLE_SPACE
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.pair_slider import PairConfig, Pairs, blended, train_pair_slider, with_pair_slider
from ...engine.w2w.space.directions import direction_named
from ...engine.w2w.space.space import WeightSpace
from ..portraits.classifier import load_classifier
from ..portraits.identities import FIRST_IDENTITY, context_caption, portraits_of
from .graded import smaller_space
from .people import LABELS, Studio, frozen, lacking

TRAINED_ON = 200
"""Number of people who train, from the first; from here to ``graded.IN_SPACE`` tune, the rest are measured."""
SURROUNDINGS = 2
"""Of each person, other ones than those measured."""
FIRST_STRENGTH = 4.5
"""Training begins at the label's own direction, this many deviations along."""


def portrait_pairs(studio: Studio, label: str, people: int = TRAINED_ON, places: int = SURROUNDINGS) -> Pairs:
    """Renders of those of the space's first people who lack an attribute, before and after, in ``places`` each."""
    from ...engine.portraits import render

    space, (attribute, value) = studio.space, LABELS[label]
    who = lacking(space.names, label)[:people].nonzero().flatten().tolist() * places
    scenes = [
        portraits_of(FIRST_IDENTITY + int(space.names[i].rsplit("-", 1)[1]), 1, 7 * n % 3000) for n, i in enumerate(who)
    ]
    before = torch.cat([render(s).images for s in scenes])
    after = torch.cat([render(s.with_attributes(**{attribute: value})).images for s in scenes])
    shown = blended(before, after)
    latents = torch.cat([studio.latents(block) for block in shown.flatten(0, 1).split(64)])
    with torch.no_grad():
        text = studio.portraits.encode([context_caption(s)[0] for s in scenes])
    return Pairs(latents.unflatten(0, shown.shape[:2]), Condition(text), space.coefficients[who])


def train_from_pairs(
    studio: Studio,
    label: str,
    folder: str | Path | None = None,
    config: PairConfig | None = None,
    progress: Progress = silent,
) -> torch.Tensor:
    """(K,) the change that shows a label at strength 1, from the label's own direction on."""
    space = studio.space
    assert isinstance(space, WeightSpace)
    denoiser = Denoiser.from_diffusers(studio.portraits.pipeline())
    begin = FIRST_STRENGTH * direction_named(space, label)
    pairs = portrait_pairs(studio, label)
    return train_pair_slider(denoiser, space, pairs, config or PairConfig(), begin, folder, progress)


def name_of(label: str) -> str:
    """What the direction trained from pairs is called, next to the label's own."""
    return f"{label} (pairs)"


def with_pairs(
    space: WeightSpace, label: str, folder: str | Path | None = None, progress: Progress = silent
) -> WeightSpace:
    """The space with a direction for a label that is trained from pairs, under ``name_of`` the label.

    It is trained in the space of the first 400 people. That space lies in the shipped one, so that nothing is lost.

    Args:
        folder: keeps the training's state.
    """
    smaller = smaller_space()
    change = train_from_pairs(Studio(frozen()[0], smaller, load_classifier()), label, folder, progress=progress)
    flat = smaller.scale * (change @ smaller.components.float())
    coefficients = (flat / space.scale) @ space.components.float().T
    return with_pair_slider(space, name_of(label), coefficients)


def train_shipped_sliders(
    labels: Sequence[str], work: str | Path, file: str | Path = PEOPLE_SPACE, progress: Progress = silent
) -> WeightSpace:
    """The recipe of the shipped people's sliders from pairs: adds those of these labels that the file lacks.

    Args:
        work: folder that keeps the trainings' states; the same call resumes.
        file: rewritten after each label, with components in float16.
    """
    space = WeightSpace.load(file)
    for i, label in enumerate(labels):
        if name_of(label) not in space.directions:
            space = with_pairs(space, label, Path(work) / label.replace(" ", "_"))
            space.save(file, "float16")
        progress(i + 1, len(labels), None)
    return space
