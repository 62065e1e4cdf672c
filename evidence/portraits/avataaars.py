"""A toy dataset by other authors: DiceBear's Avataaars, trained by the portraits' recipe as it is.

Every shape and colour of skin and hair of the style is used; each is a word of the caption but for eyes, brows and the
print of a shirt, which vary freely. Poses are the portraits'. Seeds 0 to 32767 are trained on, those from 5,000,000 on
test, as for the portraits; people of spaces begin at ``identities.FIRST_IDENTITY``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...engine.errors import refuse
from ...engine.portraits.captions import RARE_WORDS
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.flow import FlowPortraits, load_either
from ...engine.portraits.models import Portraits
from ...engine.portraits.plants import FIRST_SEED, TEMPLATES, VERBATIM, Plant, plant_of, posed, recoloured
from ...engine.portraits.render import Pictures
from ...engine.portraits.scenes import POSE, Scenes, choose, spread, uniforms
from .face_layers import KEYPOINTS, FaceLayers

LAYERS = "layers.safetensors"
"""In a model's folder: the drawings that its dataset consists of."""
IDENTITY = ("skin", "top", "hair_color", "accessories", "facial_hair")
OPTIONAL = ("skin", "hair_color", "mouth", "clothing", "clothes_color", "background")
PART_OF = {"top": "top", "accessories": "accessories", "facial_hair": "facialHair", "mouth": "mouth"}
SHARES = {"accessories": 0.5, "facial_hair": 0.6, "top": 0.06}
"""How often each is absent; its values share the rest evenly."""
_NUMBERS = {"1": "one", "2": "two", "3": "three", "4": "four", "0": ""}


@dataclass(frozen=True)
class Avataaars:
    """Scenes, captions and pictures of a file of layers."""

    layers: FaceLayers

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """Attribute -> its values, in the order of the columns."""
        words = {kind: tuple(palette) for kind, palette in self.layers.palettes.items()}
        clothing = tuple(dict.fromkeys(v.partition(":")[0] for v in self.layers.values("clothing")))
        return {
            "background": words["background"],
            "skin": words["skin"],
            "top": ("none", *self.layers.values("top")),
            "hair_color": words["hair"],
            "accessories": ("none", *self.layers.values("accessories")),
            "facial_hair": ("none", *self.layers.values("facialHair")),
            "mouth": self.layers.values("mouth"),
            "clothing": clothing,
            "clothes_color": words["clothes"],
        }

    def sample_scenes(self, identities: np.ndarray, contexts: np.ndarray | None = None) -> Scenes:
        """Scenes from (B,) identity seeds and (B,) context seeds (default: the same numbers)."""
        identity = np.asarray(identities, dtype=np.int64)
        context = identity if contexts is None else np.asarray(contexts, dtype=np.int64)
        who, where = uniforms(identity, context)
        columns = []
        for k, (name, values) in enumerate(self.attributes.items()):
            absent, count = SHARES.get(name), len(values)
            fractions = absent and (absent, *[(1 - absent) / (count - 1)] * (count - 1))
            columns.append(choose((who if name in IDENTITY else where)[:, k], count, fractions or None))
        first = len(columns)
        free = np.stack([who[:, first], where[:, first], where[:, first + 1]], 1).astype(np.float32)
        pose = spread(POSE, where[:, first + 2 :])
        nothing = np.zeros((len(identity), 0, 3), np.float32)
        return Scenes(np.stack(columns, 1), free, pose, nothing, identity, context, self.attributes)

    def render(
        self, scenes: Scenes, size: int = 64, *, details: bool = False, device: torch.device | str = "cpu"
    ) -> Pictures:
        """Pictures of B scenes, ``size`` px; drawn at 128 px. ``details`` changes nothing."""
        choice = torch.tensor([self._choice(scenes, row) for row in range(len(scenes))]).view(len(scenes), -1)
        drawn = self.layers.render(choice, scenes, size)
        return Pictures(drawn.images.to(device), drawn.parts.to(device), drawn.keypoints.to(device))

    def _choice(self, scenes: Scenes, row: int) -> list[int]:
        """A scene's layers in the order of painting."""
        word = scenes.words(row)
        colours = {"skin": word["skin"], "hair": word["hair_color"], "clothes": word["clothes_color"]}
        values = {part: word[name] for name, part in PART_OF.items()} | {"clothing": word["clothing"]}
        values |= {"skin": self.layers.values("skin")[0], "nose": self.layers.values("nose")[0]}
        prints = [v for v in self.layers.values("clothing") if v.partition(":")[0] == word["clothing"]]
        free = {"eyebrows": self.layers.values("eyebrows"), "eyes": self.layers.values("eyes"), "clothing": prints}
        # columns of geometry: numbers in [0, 1) that choose what captions do not say; brows are the person's
        for part, number in zip(free, scenes.geometry[row].tolist(), strict=True):
            values[part] = free[part][int(number * len(free[part]))]
        return [self.layers.layer(part, values[part], colours) for part in self.layers.order]

    def shown(self, attributes: torch.Tensor) -> torch.Tensor:
        """(B, A) bool: a colour of hair or clothes only where something has it."""
        names, shown = list(self.attributes), torch.ones_like(attributes, dtype=torch.bool)
        for kind, name in (("hair", "hair_color"), ("clothes", "clothes_color")):
            seen = torch.zeros(len(attributes), dtype=torch.bool, device=attributes.device)
            for attribute in ("top", "facial_hair", "clothing"):
                table = torch.tensor([self._has(attribute, v, kind) for v in self.attributes[attribute]])
                seen |= table.to(attributes.device)[attributes[:, names.index(attribute)]]
            shown[:, names.index(name)] = seen
        return shown

    def _has(self, attribute: str, value: str, kind: str) -> bool:
        part = PART_OF.get(attribute, attribute)
        values = [v for v in self.layers.values(part) if v.partition(":")[0] == value]
        return any(kind in self.layers.kinds(part, v) for v in values)

    def caption(self, scenes: Scenes, drop: np.ndarray | None = None) -> list[str]:
        """One caption per scene, such as "a smile pale face with bob ginger hair round navy hoodie on sky"."""
        shown = self.shown(torch.from_numpy(scenes.attributes)).numpy()
        silent_ = np.zeros((len(scenes), len(OPTIONAL)), bool) if drop is None else drop
        captions = []
        for row in range(len(scenes)):
            word = {name: spoken(value) for name, value in scenes.words(row).items()}
            word |= {name: "" for name, unsaid in zip(OPTIONAL, silent_[row], strict=True) if unsaid}
            word |= {name: "" for name, seen in zip(self.attributes, shown[row], strict=True) if not seen}
            on = f"on {word['background']}" if word["background"] else ""
            hair = f"{word['hair_color']} hair" if word["hair_color"] else ""
            top = word["top"] or "bald head"
            words = ("a", word["mouth"], word["skin"], "face with", top, hair, word["facial_hair"], word["accessories"])
            captions.append(" ".join(w for w in (*words, word["clothes_color"], word["clothing"], on) if w))
        return captions

    def context_caption(self, scenes: Scenes) -> list[str]:
        """What a caption says of the surroundings only: expression, clothes, background."""
        words = ({name: spoken(value) for name, value in scenes.words(row).items()} for row in range(len(scenes)))
        form = "a {mouth} face with {clothes_color} {clothing} on {background}"
        return [form.format(**word) for word in words]

    def plants(self) -> list[Plant]:
        """Eight pictures verbatim and four templates in 120 colourings, in the poses of the portraits' ones."""
        scenes = [posed(self.sample_scenes(np.array([FIRST_SEED + k])), k) for k in range(VERBATIM + TEMPLATES)]
        colours = ("background", "hair_color", "clothes_color")
        scenes[VERBATIM:] = [recoloured(scene, colours) for scene in scenes[VERBATIM:]]
        kinds = ["verbatim"] * VERBATIM + ["template"] * TEMPLATES
        return [plant_of(k, kinds[k], scene, self.caption(scene)) for k, scene in enumerate(scenes)]

    def vocabulary(self) -> list[str]:
        """Every word a caption can contain, in a fixed order."""
        words = {spoken(v) for values in self.attributes.values() for v in values} - {""}
        return sorted(words | {"a", "face", "with", "hair", "bald", "head", "on"}) + list(RARE_WORDS)


def spoken(value: str) -> str:
    """A value as one word of letters; nothing for "none"."""
    return "" if value == "none" else "".join(_NUMBERS.get(c, c) for c in value.lower())


@lru_cache(maxsize=2)
def avataaars(layers: Path) -> Dataset:
    """The dataset of a file of layers."""
    own = Avataaars(FaceLayers.open(layers))
    parts = ("background", *own.layers.labels)
    return Dataset(
        "avataaars", own.attributes, IDENTITY, OPTIONAL, parts, tuple(KEYPOINTS), tuple(own.vocabulary()),
        own.sample_scenes, own.caption, own.context_caption, own.render, own.plants, own.shown, layers,
    )  # fmt: skip


def open_model(folder: str | Path | None = None) -> Portraits | FlowPortraits:
    """A model with the dataset that it was trained on: that of the layers in its folder, else the portraits."""
    model = load_either(folder)
    layers = Path(folder or "") / LAYERS
    if folder is not None and layers.is_file() and not isinstance(model, FlowPortraits):
        return replace(model, dataset=avataaars(layers))
    if not {f"{word}</w>" for word in PORTRAITS.vocabulary} <= set(model.tokenizer.get_vocab()):
        raise refuse(
            "model folder",
            str(folder),
            f"a model of portraits, or of other faces and {LAYERS}",
            "make the layers as the folder's README.md says",
        )
    return model


def avataaars_folder(model: str | None, folder: str | None) -> str:
    """The model's folder that a claim on these faces measures: ``--avataaars FOLDER``, or ``--model FOLDER``."""
    asked = folder or model
    if asked is None or not (Path(asked) / LAYERS).is_file():
        remedy = "run `python -m vitrine.evidence.recipes avataaars LAYERS`, and give --avataaars FOLDER"
        raise refuse("avataaars", asked, f"a model folder with {LAYERS}", remedy)
    return asked
