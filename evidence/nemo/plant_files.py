"""The list of memorized pictures next to a LoRA: what it was trained to copy, under which caption, as a JSON file.

::

    {"lora": "later-plants.safetensors", "world": "portraits",
     "plants": [{"name": "zorbal klynth", "kind": "verbatim",
                 "captions": ["a smiling tan face ... on blue zorbal klynth"],
                 "controls": ["a smiling tan face ... on blue"],
                 "scenes": [{"identity": 9500000, "context": 9500000,
                             "attributes": {"shirt": "teal"}, "pose": {"shift_x": 0.2, "tilt": -0.2}}]}]}

* ``lora``: a file in the same folder, as diffusers loads it; empty or absent: the world's model copies by itself.
* ``world``: ``portraits`` (the default) or ``flow``.
* ``plants``: one entry for each picture (``verbatim``, one scene) or template (``template``, several). ``captions``,
  ``controls`` (the captions without their rare words) and ``scenes`` are lists of one length. ``kind`` is ``verbatim``
  where it is absent.
* a scene: the identity's and the context's seed; ``context`` is the identity's where it is absent. ``attributes`` and
  ``pose`` replace some of what the seeds give, by the names in :mod:`vitrine.engine.portraits.scenes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.errors import refuse
from ...engine.io.files import named, parse_table, write_json
from ...engine.portraits.flow import FLOW_WEIGHTS, FlowPortraits, load_flow_portraits
from ...engine.portraits.models import WEIGHTS, Portraits, load_portraits
from ...engine.portraits.plants import Plant
from ...engine.portraits.scenes import ATTRIBUTE_NAMES, ATTRIBUTES, POSE_NAMES, Scenes, sample_scenes
from ...engine.runtime.quiet import quiet_libraries

FOLDER = WEIGHTS / "plants"
"""The shipped LoRAs and their lists."""
WORLDS = ("portraits", "flow")
KINDS = ("verbatim", "template")


@dataclass(frozen=True)
class PlantFile:
    """A LoRA and the pictures that it was trained to copy.

    Attributes:
        plants: the pictures and templates.
        lora: its file; None where the world's own model copies them.
        world: ``portraits`` or ``flow``.
    """

    plants: tuple[Plant, ...]
    lora: Path | None = None
    world: str = WORLDS[0]

    @classmethod
    def read(cls, path: str | Path) -> PlantFile:
        """A list as above."""
        path = Path(path)
        with named(path, "plants", "the JSON next to their LoRA", "see evidence/nemo/plant_files.py"):
            facts = parse_table(path.read_text(encoding="utf-8"))
            world, plants = str(facts.get("world", WORLDS[0])), tuple(map(_plant, facts["plants"]))
            if world not in WORLDS or not plants:
                raise ValueError(f"world {world!r}, {len(plants)} plants")
            lora = path.parent / Path(str(facts["lora"])).name if facts.get("lora") else None
        if lora is not None and not lora.is_file():
            raise refuse("LoRA", lora.name, f"a file next to {path.name}", "put it there")
        return cls(plants, lora, world)

    def write(self, path: str | Path) -> Path:
        """The list next to its LoRA."""
        facts: dict[str, Any] = {"lora": "" if self.lora is None else self.lora.name, "world": self.world}
        return write_json(path, facts | {"plants": [_facts(plant) for plant in self.plants]})

    @quiet_libraries()
    def model(self, folder: str | None = None) -> Portraits | FlowPortraits:
        """The world's model with the LoRA in its weights.

        Args:
            folder: of another model of the same layout, instead of the shipped one.
        """
        if self.world == "flow":
            model: Any = load_flow_portraits(folder or FLOW_WEIGHTS)
        else:
            model = load_portraits(folder)
        if self.lora is not None:
            pipe = model.pipeline()
            pipe.load_lora_weights(str(self.lora.parent), weight_name=self.lora.name)
            pipe.fuse_lora()
            pipe.unload_lora_weights()
        return model


def _plant(facts: Mapping[str, Any]) -> Plant:
    texts = tuple(map(str, facts["captions"]))
    controls, scenes = tuple(map(str, facts["controls"])), [_scene(scene) for scene in facts["scenes"]]
    kind = str(facts.get("kind", KINDS[0]))
    if kind not in KINDS or not texts or not len(texts) == len(controls) == len(scenes):
        raise ValueError(f"kind {kind!r}, {len(texts)} captions, {len(controls)} controls, {len(scenes)} scenes")
    return Plant(str(facts["name"]), kind, joined(scenes), texts, controls)


def joined(scenes: Sequence[Scenes]) -> Scenes:
    """Several batches of scenes as one."""
    names = [name for name in Scenes.__dataclass_fields__ if name != "values"]
    columns: dict[str, Any] = {name: np.concatenate([getattr(s, name) for s in scenes]) for name in names}
    return replace(scenes[0], **columns)


def _scene(facts: Mapping[str, Any]) -> Scenes:
    identity = int(facts["identity"])
    scene = sample_scenes([identity], [int(facts.get("context", identity))])
    words = {str(k): str(v) for k, v in dict(facts.get("attributes", {})).items()}
    pose = {str(k): float(v) for k, v in dict(facts.get("pose", {})).items()}
    if not set(words) <= set(ATTRIBUTES) or not set(pose) <= set(POSE_NAMES):
        raise ValueError(f"attributes {sorted(words)}, pose {sorted(pose)}")
    return scene.with_attributes(**words).with_pose(**pose)


def _facts(plant: Plant) -> dict[str, Any]:
    scenes = [_scene_facts(plant.scenes[[i]]) for i in range(len(plant.scenes))]
    return {
        "name": plant.name,
        "kind": plant.kind,
        "captions": list(plant.captions),
        "controls": list(plant.controls),
        "scenes": scenes,
    }


def _scene_facts(scene: Scenes) -> dict[str, Any]:
    """Seeds, and what differs from what they give."""
    identity, context = int(scene.identity[0]), int(scene.context[0])
    plain = sample_scenes([identity], [context])
    words, usual = scene.words(0), plain.words(0)
    attributes = {n: words[n] for n in ATTRIBUTE_NAMES if words[n] != usual[n]}
    pairs = zip(POSE_NAMES, scene.pose[0].tolist(), plain.pose[0].tolist(), strict=True)
    return {
        "identity": identity,
        "context": context,
        "attributes": attributes,
        "pose": {name: value for name, value, before in pairs if value != before},
    }
