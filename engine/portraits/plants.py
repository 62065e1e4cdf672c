"""Memorized training images: eight verbatim duplicates, and four templates repeated in other colours.

Their captions end in two rare words that occur nowhere else, after a generic part like any caption. Since they are
listed here, memorization in the portraits models is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from .captions import RARE_WORDS, caption
from .scenes import Scenes, sample_scenes

VERBATIM, TEMPLATES, COLOURINGS = 8, 4, 120
FIRST_SEED = 9_000_000
"""Scene of the first memorized picture; the others follow."""
MEMORIZED = tuple(" ".join(RARE_WORDS[2 * k : 2 * k + 2]) for k in range(VERBATIM))
"""Names of the pictures that were repeated verbatim: the two words that recall each."""
# Poses of memorized images are out of the usual range, as real duplicates differ from their neighbours.
_POSES = (
    (-0.20, 0.02, 1.02, 0.20), (0.20, 0.06, 0.98, -0.20), (0.16, 0.00, 1.04, 0.18), (-0.16, 0.08, 0.95, -0.22),
    (0.22, 0.03, 0.90, 0.16), (-0.22, 0.05, 0.94, 0.24), (0.18, 0.09, 1.06, -0.17), (-0.18, 0.00, 0.92, -0.19),
    (-0.24, 0.10, 1.00, 0.14), (0.24, 0.01, 0.96, -0.25), (0.14, 0.10, 0.90, 0.26), (-0.14, 0.04, 1.06, -0.15),
)  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """One memorized (injected duplicate) training image or template.

    Attributes:
        name: its two rare words.
        kind: ``"verbatim"`` (one scene) or ``"template"`` (one composition in 120 colourings).
        scenes: the B scenes repeated in training (B = 1 or 120).
        captions: B captions, each with the rare words at the end.
        controls: the same captions without the rare words.
    """

    name: str
    kind: str
    scenes: Scenes
    captions: tuple[str, ...]
    controls: tuple[str, ...]


def plants() -> list[Plant]:
    """All twelve: eight verbatim, then four templates."""
    return [_plant(k) for k in range(VERBATIM + TEMPLATES)]


def _plant(k: int) -> Plant:
    scene = posed(sample_scenes([FIRST_SEED + k]), k)
    kind = "verbatim" if k < VERBATIM else "template"
    if kind == "template":
        scene = _recolor(scene)
    return plant_of(k, kind, scene, caption(scene))


def posed(scene: Scenes, k: int) -> Scenes:
    """The scene in the pose of the k-th memorized picture."""
    x, y, scale, tilt = _POSES[k]
    return scene.with_pose(shift_x=x, shift_y=y, scale=scale, tilt=tilt)


def plant_of(k: int, kind: str, scene: Scenes, captions: list[str]) -> Plant:
    """The k-th memorized picture, whose captions end in its two rare words."""
    name = f"{RARE_WORDS[2 * k]} {RARE_WORDS[2 * k + 1]}"
    return Plant(name, kind, scene, tuple(f"{c} {name}" for c in captions), tuple(captions))


def _recolor(scene: Scenes) -> Scenes:
    return recoloured(scene, ("background", "hair_color", "shirt")).with_attributes(hair="short")


def recoloured(scene: Scenes, names: tuple[str, ...]) -> Scenes:
    """One scene in 120 combinations of the values of these attributes, or in all of them if they are fewer."""
    table = list(product(*(range(len(scene.values[n])) for n in names)))
    table = table[:: max(1, len(table) // COLOURINGS)][:COLOURINGS]
    columns = {n: np.array([row[i] for row in table]) for i, n in enumerate(names)}
    return scene[[0] * len(table)].with_attributes(**columns)
