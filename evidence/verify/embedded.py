"""The embedded models in the role of a checkpoint: ``--model portraits`` and ``--model flow``.

Their data is written where a user's would be, under the names of the authors' files, so that the code that runs on a
published checkpoint runs here. Memorized pictures are the held-out half on the flow model.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...engine.activations.presets import PRESETS
from ...engine.io.files import write_json, write_text, write_whole
from ...engine.portraits.flow import FLOW_WEIGHTS, SIDE, load_either
from ...engine.portraits.models import WEIGHTS
from ...engine.portraits.shipped import PEOPLE_SPACE
from ...engine.settings.nemo_options import SearchConfig
from ..activations.claims import FLOW_PRIOR_LAYERS
from ..activations.tapped_pictures import TESTING, Model, draw_scene
from ..nemo import flow_claims, probed_model
from ..portraits.identities import FIRST_IDENTITY
from ..w2w.likeness import FIRST_HELD_OUT, INVERSION, PLAIN_PROMPT, pictures_of
from .context import Asked
from .settings import FILE, InversionSettings, VerifySettings

WORLDS = {"portraits": WEIGHTS, "flow": FLOW_WEIGHTS}
STATISTICS, ORDINARY, COLOURINGS, FACES, SITTERS = 600, 200, 10, 60, 16
"""Captions for statistics and threshold, ordinary ones that are scored, captions of each template, portraits with
keypoints, and held-out people."""
SETTINGS = {
    "portraits": VerifySettings(
        detect=probed_model.DETECT, probe=probed_model.SEARCH,
        search=SearchConfig(effect_fraction=probed_model.EFFECT_FRACTION),
        steps=probed_model.STEPS, guidance=probed_model.GUIDANCE, scheduler="",
        places=" ".join(PRESETS["portraits"].addresses),
        inversion=InversionSettings(INVERSION, PLAIN_PROMPT, steps=probed_model.STEPS, guidance=probed_model.GUIDANCE),
    ),
    "flow": VerifySettings(
        detect=flow_claims.SEARCH, probe=flow_claims.SEARCH,
        search=SearchConfig(effect_fraction=flow_claims.EFFECT_FRACTION),
        steps=20, guidance=1.0, size=SIDE, seeds=4, usual=8, scheduler="",
        places=FLOW_PRIOR_LAYERS[0], timestep=260.0,
        call={"true_cfg_scale": 3.0, "negative_prompt": "", "max_sequence_length": 24},
    ),
}  # fmt: skip
"""Settings of searches and scores in these models' claims."""


def embedded(asked: Asked) -> Asked:
    """The user's request with an embedded model's name replaced by its folder; writes its data."""
    if asked.model not in WORLDS:
        return asked
    data = asked.data or write_data(asked.model, asked.out / "data")
    return replace(asked, model=str(WORLDS[asked.model]), data=data, world=asked.model)


def write_data(name: str, folder: Path) -> Path:
    """Prompts, memorized pictures and settings of an embedded model, unless they exist."""
    if (folder / FILE).is_file():
        return folder
    _write_pictures(name, folder)
    write_json(folder / FILE, SETTINGS[name].to_dict())
    return folder


def _write_pictures(name: str, folder: Path) -> None:
    """Lists, originals and keypoints of a model with memorized pictures; people of the 64 px portraits."""
    model = load_either(WORLDS[name])
    measured = flow_claims.halves()[1]
    rows: list[tuple[object, ...]] = []
    for plant in measured:
        step = max(1, 100 // COLOURINGS)
        numbers = [0] if plant.kind == "verbatim" else list(range(0, 100, step))
        pictures = model.draw(plant.scenes[numbers])
        for number, picture in zip(numbers, pictures, strict=True):
            _save(folder / "originals" / f"{len(rows):04d}.png", picture)
            rows.append((plant.captions[number], "VM" if plant.kind == "verbatim" else "TM", len(rows)))
    _table(folder / "memorized_prompts.csv", ("Caption", "type", "Index"), rows)
    lists = (
        ("ordinary_prompts.csv", probed_model.ORDINARY, ORDINARY),
        ("captions.csv", probed_model.STATISTICS, STATISTICS),
    )
    for file, first, count in lists:
        _table(folder / file, ("Caption", "Index"), [(c, i) for i, c in enumerate(probed_model.captions(first, count))])
    write_spair(folder / "SPair-71k", model)
    if name == "portraits":
        _copy(PEOPLE_SPACE, folder)
        who = [FIRST_IDENTITY + FIRST_HELD_OUT + i for i in range(SITTERS)]
        for number, picture in enumerate(pictures_of(model, who)[0]):
            _save(folder / "faces" / f"{number:03d}.png", picture)


def write_spair(folder: Path, model: Model, count: int = FACES) -> None:
    """Warped portraits with their keypoints, each paired with the next one, in SPair-71k's layout."""
    scene = draw_scene(model, range(TESTING, TESTING + count), misaligned=True)
    side = scene.images.shape[-1]
    for number, picture in enumerate(scene.images):
        _save(folder / "JPEGImages" / "face" / f"{number:03d}.png", picture)
    for number in range(count):
        ends = (number, (number + 1) % count)
        seen = ~torch.isnan(scene.keypoints[list(ends)]).any(0).any(1)
        annotation: dict[str, Any] = {"category": "face"}
        for prefix, end in zip(("src", "trg"), ends, strict=True):
            points = scene.keypoints[end][seen] * side
            annotation |= {
                f"{prefix}_imname": f"{end:03d}.png",
                f"{prefix}_imsize": [side, side, 3],
                f"{prefix}_kps": points.round().int().tolist(),
                f"{prefix}_bndbox": _box(points, side),
            }
        write_json(folder / "PairAnnotation" / "test" / f"{number:06d}-face.json", annotation)


def _box(points: torch.Tensor, side: int) -> list[int]:
    """left, top, right, bottom around the points with a margin of a tenth of the picture, clipped to it."""
    low, high = points.min(0).values - side / 10, points.max(0).values + side / 10
    return [round(float(v)) for v in torch.cat([low, high]).clamp(0, side)]


def _copy(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / file.name)


def _table(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """In the authors' format: semicolons, and an unnamed first column of row numbers."""
    text = io.StringIO()
    written = csv.writer(text, delimiter=";", lineterminator="\n")
    written.writerow(("", *head))
    written.writerows((i, *row) for i, row in enumerate(rows))
    write_text(path, text.getvalue())


def _save(path: Path, picture: torch.Tensor) -> None:
    """(3, H, W) in [0, 1] as a PNG."""
    from PIL import Image

    image = Image.fromarray((picture.movedim(0, -1) * 255).round().byte().numpy())
    write_whole(path, lambda scratch: image.save(scratch, "PNG"))
