"""Sliders of the portraits trained from pairs: renders of one person at one position, with and without an attribute."""

from __future__ import annotations

from pathlib import Path

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.pair_slider import PairConfig, Pairs, blended, train_pair_slider
from ...engine.w2w.space.directions import direction_named
from ...engine.w2w.space.space import WeightSpace
from ..portraits.identities import FIRST_IDENTITY, context_caption, portraits_of
from .people import LABELS, Studio, labels

TRAINED_ON = 200
"""Number of people who train, from the first; from here to ``graded.IN_SPACE`` tune, the rest are measured."""
PLACES = 2
"""Surroundings of each person, other ones than those measured."""
BEGIN = 4.5
"""Training begins at the label's own direction, this many deviations along."""


def lacking(names: tuple[str, ...], label: str) -> torch.Tensor:
    """(N,) which people lack an attribute; a hair colour only where there is hair."""
    table = labels(names)
    lacks = table[label] == 0
    return lacks & (table["bald"] == 0) if LABELS[label][0] == "hair_color" else lacks


def portrait_pairs(studio: Studio, label: str, people: int = TRAINED_ON, places: int = PLACES) -> Pairs:
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
    studio: Studio, label: str, folder: str | Path | None = None, config: PairConfig | None = None,
    progress: Progress = silent,
) -> torch.Tensor:  # fmt: skip
    """(K,) the change that shows a label at strength 1, from the label's own direction on."""
    space = studio.space
    assert isinstance(space, WeightSpace)
    denoiser = Denoiser.from_diffusers(studio.portraits.pipeline())
    begin = BEGIN * direction_named(space, label)
    pairs = portrait_pairs(studio, label)
    return train_pair_slider(denoiser, space, pairs, config or PairConfig(), begin, folder, progress)


def name_of(label: str) -> str:
    """What the direction trained from pairs is called, next to the label's own."""
    return f"{label} (pairs)"


def shipped_change(space: WeightSpace, label: str) -> torch.Tensor | None:
    """(D,) what the space's direction from pairs changes at the strength it was trained at; None if it has none."""
    direction, at_1 = space.directions.get(name_of(label)), space.info.get("pair_sliders", {}).get(name_of(label))
    if direction is None or at_1 is None:
        return None
    return space.scale * (float(at_1) * direction @ space.components.float())
