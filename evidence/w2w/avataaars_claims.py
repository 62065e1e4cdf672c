"""A space of people by other authors: ``vitrine reproduce w2w.sliders.avataaars --avataaars FOLDER``.

Recipe and settings are the portraits'. 200 people are trained: the first 160 make the space whose sliders are measured,
24 of these tune them, and the last 40 are edited.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...engine.errors import VitrineError, refuse
from ...engine.portraits.dataset import Dataset
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.building.build_space import BuildConfig, build_space
from ...engine.w2w.space.directions import direction_named, joint_directions, with_directions
from ...engine.w2w.space.space import WeightSpace
from ..portraits.avataaars import avataaars_folder, open_model
from ..portraits.classifier import classifier_of
from ..portraits.identities import FIRST_IDENTITY
from ..registry import ClaimResult, Table, arms, claim
from .drawing import EDIT_STEPS
from .even_strengths import POSITIONS, StrengthMap
from .graded import HEAD, LARGEST_STRENGTH, Graded, Sitting
from .people import PAPER, Studio, subspace

PEOPLE, IN_SPACE, TUNING = 200, 160, 24
RANDOM_DIRECTION = "random direction of the same length"
HEADWEAR = ("hat", "hijab", "turban", "winterHat1", "winterHat02", "winterHat03", "winterHat04")
LABELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "glasses": ("accessories", ("kurt", "prescription01", "prescription02", "round", "sunglasses", "wayfarers")),
    "facial hair": (
        "facial_hair",
        ("beardLight", "beardMajestic", "beardMedium", "moustacheFancy", "moustacheMagnum"),
    ),
    "headwear": ("top", HEADWEAR),
    "dark skin": ("skin", ("black", "brown", "sienna")),
}
"""Label -> attribute and values. Single tops and colours are too rare among 200 people."""


def labels_of(dataset: Dataset) -> dict[str, tuple[str, tuple[str, ...]]]:
    """:data:`LABELS` with the values that the dataset has."""
    return {
        label: (attribute, tuple(v for v in values if v in dataset.attributes[attribute]))
        for label, (attribute, values) in LABELS.items()
    }


def known(names: tuple[str, ...], dataset: Dataset) -> dict[str, torch.Tensor]:
    """Label -> (N,) of 0 / 1, of the people with these names."""
    scenes = dataset.sample_scenes([FIRST_IDENTITY + int(n.rsplit("-", 1)[1]) for n in names])
    table = {}
    for label, (attribute, values) in labels_of(dataset).items():
        codes = [dataset.attributes[attribute].index(value) for value in values]
        table[label] = torch.isin(torch.from_numpy(scenes.column(attribute)), torch.tensor(codes)).float()
    return table


@lru_cache(maxsize=2)
def open_studio(folder: str) -> Studio:
    """The model with the space of the LoRAs in its subfolder ``people``."""
    loras, face = Path(folder) / "people", Path(folder) / "readout" / "identity.safetensors"
    if not loras.is_dir():
        command = f"vitrine w2w train-loras --model {folder} --people {PEOPLE} --out {loras}"
        raise refuse("people", str(loras), "a folder of LoRAs", f"run `{command}`")
    if not face.is_file():
        raise refuse(
            "identity features",
            str(face),
            "a fitted projection",
            f"run `python -m vitrine.evidence.recipes identity {folder}`",
        )
    model = open_model(folder)
    for module in (model.backbone, model.text_encoder, model.vae):
        module.requires_grad_(False)
    space = build_space(loras, BuildConfig("factors")).space
    assert isinstance(space, WeightSpace)
    return Studio(
        model, _directed(space, model.dataset), classifier_of(model), labels=labels_of(model.dataset), face=face
    )


def _directed(space: WeightSpace, dataset: Dataset) -> WeightSpace:
    return with_directions(space, joint_directions(space, known(space.names, dataset)))


@claim(
    "w2w.sliders.avataaars",
    paper=PAPER,
    figure="sliders of a space of 160 people on 40 others, faces of DiceBear's Avataaars",
    target="for 2 of 4 attributes: rises along five even positions with no step above 0.4, others <= 10 points, "
    "further than a random direction of the same length",
    minutes=8,
    quick_minutes=1.5,
)
def sliders_avataaars(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """The tuning people say where a slider begins and ends, and its map. Quick: six people each."""
    whole = open_studio(avataaars_folder(model, avataaars))
    people = whole.space
    assert isinstance(people, WeightSpace)
    first = min(IN_SPACE, people.count * 4 // 5)
    studio = replace(whole, space=_directed(subspace(people, first), whole.portraits.dataset))
    table, rises, good, seen = [], dict[str, list[float]](), dict[str, bool](), 0
    for i, label in enumerate(studio.labels):
        tuning = _sitting(studio, people, label, range(first), 6 if quick else TUNING)
        measured = _sitting(studio, people, label, range(first, people.count), 6 if quick else people.count)
        ours, random = _both(tuning, measured)
        good[label] = ours.even and max(ours.others) <= 0.10 and sum(ours.steps) > sum(random.steps)
        rises[label] = [sum(ours.steps), sum(random.steps)]
        table += [(label, *ours.row()), (f"{label}, random direction", *random.row())]
        seen = max(seen, len(measured.weights))
        progress(i + 1, len(studio.labels), None)
    mean = {name: sum(r[k] for r in rises.values()) / len(rises) for k, name in enumerate(("ours", RANDOM_DIRECTION))}
    details: dict[str, Any] = {"rise of each, and by a random direction": rises}
    return ClaimResult(
        round(mean["ours"], 3),
        None,
        sum(good.values()) >= 2,
        details,
        n=seen,
        parts=good,
        arms=arms(mean, {"ours": "ours", RANDOM_DIRECTION: "trivial"}),
        tables=(Table("Sliders", HEAD, tuple(table)),),
    )


def _sitting(studio: Studio, people: WeightSpace, label: str, numbers: range, most: int) -> Sitting:
    """Those of the numbered people who lack the attribute, ``most`` at most."""
    lacks = known(people.names, studio.portraits.dataset)[label] == 0
    who = [i for i in numbers if bool(lacks[i])][:most]
    if not who:
        all_have_it = f"{len(numbers)} people from number {numbers.start}, each of them with {label}"
        raise refuse("people", all_have_it, "one who lacks the attribute", "train more with `vitrine w2w train-loras`")
    return Sitting(studio, label, people.decode(people.coefficients[who]), EDIT_STEPS)


def _both(tuning: Sitting, measured: Sitting) -> tuple[Graded, Graded]:
    """The slider that the tuning people ended, and a random direction, at five positions on the measured people."""
    try:
        points = tuning.tuned()
    except VitrineError:  # the attribute does not rise: even strengths
        points = StrengthMap(tuple(LARGEST_STRENGTH * i / (POSITIONS - 1) for i in range(POSITIONS)))
    space = tuning.studio.space
    assert isinstance(space, WeightSpace)
    even = [i / (POSITIONS - 1) for i in range(POSITIONS)]
    direction = direction_named(space, tuning.label)
    other = torch.randn(direction.shape, generator=torch.Generator().manual_seed(0))
    change = space.scale * ((other * direction.norm() / other.norm()) @ space.components.float())
    ours = measured.graded(lambda v: measured.moved(points.at(v), None, points.start), even)
    return ours, measured.graded(lambda v: measured.moved(points.at(v), change, points.start), even)
