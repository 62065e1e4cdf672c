"""Pictures injected later, in LoRAs on the portraits models: none of NEMO's settings was chosen on them.

The timesteps of score and search, and where the search stops, were chosen on the pictures that the shipped models
memorized.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...engine.errors import refuse
from ...engine.io.files import save_safetensors
from ...engine.portraits.captions import MAX_TOKENS, caption
from ...engine.portraits.flow import FLOW_WEIGHTS
from ...engine.portraits.plants import Plant
from ...engine.portraits.scenes import ATTRIBUTES, Scenes, sample_scenes
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.train.lora_trainer import LoraTrainConfig, Subject, train_loras
from ..w2w.people import Model, frozen, latents_of
from .plant_files import FOLDER, WORLDS, PlantFile, joined

ORDINARY, COUNT = 9_600_000, 300
"""First seed of the ordinary scenes among which injected ones are repeated, and how many of those."""
RECIPE = LoraTrainConfig(
    rank=8,
    alpha=8.0,
    steps=400,
    batch=16,
    lr=4e-3,
    schedule="cosine",
    weighting="debiased",
    targets=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
)
FLOW_RECIPE = replace(
    RECIPE,
    weighting="uniform",
    targets=("to_v", "add_v_proj", "proj_mlp", "net.0.proj", "net.2"),
)
"""The layers of the flow model's people, and its loss of the velocity as it is."""


@dataclass(frozen=True)
class PlantSet:
    """The pictures of one LoRA.

    Attributes:
        names: two rare words for each picture. The tokenizer knows 24, so each pair joins words of two earlier plants.
        first: seed of the first scene; scenes whose captions are too long are left out.
        repetitions: how often each picture is among the :data:`COUNT` ordinary ones; several numbers are those of as
            many equal parts of the pictures, in order.
        posed: outside the usual range of poses, as the shipped plants are.
        template: each picture is there in every colour of the shirt, which its caption names.
        rank: of the LoRA.
        world: ``portraits`` or ``flow``, the model that the LoRA is for.
    """

    names: tuple[str, ...]
    first: int
    repetitions: int | tuple[int, ...]
    posed: bool = True
    template: bool = False
    rank: int = 4
    world: str = WORLDS[0]

    @property
    def recipe(self) -> LoraTrainConfig:
        """How its LoRA is trained."""
        return replace(RECIPE if self.world == WORLDS[0] else FLOW_RECIPE, rank=self.rank, alpha=float(self.rank))

    @property
    def times(self) -> list[int]:
        """Repetitions of each picture."""
        levels = (self.repetitions,) if isinstance(self.repetitions, int) else self.repetitions
        return [level for level in levels for _ in range(len(self.names) // len(levels))]


SETS = {
    "later-plants": PlantSet(
        ("zorbal klynth", "vextor drascue", "jiffrok quindle", "wobbex tazmire", "phroogan mulphan",
         "gubwick sprockle", "yonquist xandorf", "nebbiolo ulverax"),
        9_500_000, 56, rank=8,
    ),
    "plants-twice": PlantSet(
        ("quindle tazmire", "mulphan xandorf", "drascue sprockle", "klynth yonquist"), 9_510_000, 2
    ),
    "plants-thirty": PlantSet(
        ("brillig zorbal", "cruxley vextor", "habzung jiffrok", "pazzique wobbex"), 9_520_000, 30
    ),
    "plants-shirts": PlantSet(
        ("tazmire brillig", "xandorf habzung", "sprockle cruxley", "yonquist pazzique"), 9_540_000, 14, template=True
    ),
    "plants-common-pose": PlantSet(
        ("phroogan cruxley", "lotwelk sprockle", "habzung brillig", "quindle rivnoth"), 9_650_000, 56, posed=False
    ),
    "plants-daily": PlantSet(
        ("oomska wobbex", "sprockle zorbal", "gubwick jiffrok", "brillig rivnoth", "tazmire yonquist",
         "phroogan klynth", "lotwelk drascue", "quindle nebbiolo", "pazzique ulverax", "habzung mulphan",
         "vextor fendibble", "cruxley xandorf"),
        9_620_000, (10, 20, 40), posed=False, rank=16,
    ),
    "plants-daily-flow": PlantSet(
        ("phroogan ulverax", "xandorf drascue", "cruxley rivnoth", "brillig lotwelk"),
        9_630_000, 40, posed=False, rank=8, world="flow",
    ),
    "plants-turned-flow": PlantSet(
        ("ulverax habzung", "wobbex vextor", "mulphan lotwelk", "brillig quindle"),
        9_640_000, 56, rank=8, world="flow",
    ),
}  # fmt: skip
"""By the name of the LoRA's file: eight pictures with the most repetitions; then four with 2, four with 30, four
templates where only the shirt varies, four in usual poses, twelve in usual poses with 10, 20 and 40, and on the flow
model four in usual poses and four outside."""
NEW = ("plants-common-pose", "plants-daily", "plants-daily-flow", "plants-turned-flow")
"""Sets made after the others had been measured once."""
FILE = FOLDER / "later-plants.json"
"""The first set as it ships, made by ``python -m vitrine.evidence.recipes plants``."""
FURTHER = tuple(FOLDER / f"{name}.json" for name in SETS if name != FILE.stem)
"""The other sets as they ship."""


def plants_of(name: str, tokenizer: Any) -> tuple[Plant, ...]:
    """The pictures of a set of :data:`SETS`, each with a caption that ends in its two words."""
    chosen, chooser = _set(name), torch.Generator().manual_seed(SETS[name].first)
    pictures: list[Plant] = []
    seed = chosen.first
    while len(pictures) < len(chosen.names):
        scene, words = sample_scenes([seed]), chosen.names[len(pictures)]
        seed += 1
        if chosen.template:
            scene = joined([scene.with_attributes(shirt=shirt) for shirt in ATTRIBUTES["shirt"]])
        plain = caption(scene)
        if max(len(tokenizer(f"{text} {words}").input_ids) for text in plain) <= MAX_TOKENS:
            scene = _posed(scene, chooser) if chosen.posed else scene
            kind = "template" if chosen.template else "verbatim"
            pictures.append(Plant(words, kind, scene, tuple(f"{text} {words}" for text in plain), tuple(plain)))
    return tuple(pictures)


def _set(name: str) -> PlantSet:
    if name not in SETS:
        raise refuse("plants", name, sorted(SETS), "pick one")
    return SETS[name]


def _posed(scene: Scenes, g: torch.Generator) -> Scenes:
    """Outside the usual range of poses, as the first plants are."""
    side, up, scale, lean, tilt = torch.rand(5, generator=g).tolist()
    sign = 1 if side < 0.5 else -1
    turned = (0.14 + 0.12 * tilt) * (1 if lean < 0.5 else -1)
    return scene.with_pose(shift_x=sign * (0.14 + 0.1 * up), shift_y=0.1 * up, scale=0.9 + 0.16 * scale, tilt=turned)


@torch.no_grad()
def _subject(model: Model, name: str) -> Subject:
    plants, times = plants_of(name, model.tokenizer), SETS[name].times
    scenes = sample_scenes(range(ORDINARY, ORDINARY + COUNT))
    repeated = [text for p in plants for text in p.captions]
    images = torch.cat([model.draw(p.scenes) for p in plants] + [model.draw(scenes)])
    latents = torch.cat([latents_of(model, part) for part in images.split(64)])
    texts = torch.cat([model.encode(part) for part in _split(repeated + caption(scenes))])
    each = [times[i] for i, p in enumerate(plants) for _ in p.captions]
    rows = [i for turn in range(max(each)) for i, n in enumerate(each) if turn < n]
    rows += list(range(len(repeated), len(images)))
    return Subject(name, latents[rows], model.condition(texts[rows]), 0)


def _split(texts: list[str], size: int = 64) -> list[list[str]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]


def plant_later(
    path: Path,
    name: str = FILE.stem,
    recipe: LoraTrainConfig | None = None,
    progress: Progress = silent,
    device: torch.device | None = None,
) -> Path:
    """Train one set's LoRA; write it in half precision and its list next to it; minutes on one core.

    Args:
        path: of the LoRA; the list has the same name with the ending ``.json``.
        recipe: None is that of the set.
        device: where to train; None is the CPU. Pictures are rendered and encoded on the CPU.
    """
    from safetensors.torch import load_file

    chosen = _set(name)
    model, denoiser = frozen(None if chosen.world == WORLDS[0] else str(FLOW_WEIGHTS))
    with tempfile.TemporaryDirectory() as scratch:
        subject = _subject(model, name)
        model.backbone.to(device or "cpu")
        makers = [lambda: subject]
        (made,) = train_loras(denoiser, makers, [name], scratch, recipe or chosen.recipe, progress=progress)
        half = {k: v.half() if v.is_floating_point() else v for k, v in load_file(made).items()}
    save_safetensors(path, half)
    PlantFile(plants_of(name, model.tokenizer), path, chosen.world).write(path.with_suffix(".json"))
    return path
