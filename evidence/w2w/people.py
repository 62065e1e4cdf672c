"""People of the portraits world as a space of models: how it is trained, labelled and sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.jobs.digests import digest
from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.models import Portraits
from ...engine.portraits.shipped import FLOW_PEOPLE_SPACE, PEOPLE_SPACE
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.building.build_space import BuildConfig, build_space
from ...engine.w2w.edit.editing import materialise
from ...engine.w2w.space.delta_space import Space
from ...engine.w2w.space.directions import joint_directions, with_directions
from ...engine.w2w.space.manifest import Manifest
from ...engine.w2w.space.principal_components import Matrix, PCAConfig, principal_components
from ...engine.w2w.space.space import WeightSpace
from ...engine.w2w.train.batched_lora import late_lora
from ...engine.w2w.train.lora_trainer import LoraTrainConfig, Subject, SubjectMaker, train_loras
from ..portraits.avataaars import open_model
from ..portraits.classifier import AttributeClassifier, load_classifier
from ..portraits.identities import (
    FACE_FILE,
    FIRST_IDENTITY,
    identity_attributes,
    identity_features,
    people,
    portraits_of,
)
from ..portraits.quality import look
from ..portraits.sampling import decode, sample_latents

PAPER = "weights2weights (Dravid et al., NeurIPS 2024)"
PEOPLE, PICTURES = 520, 16
RECIPE = LoraTrainConfig(rank=1, alpha=4.0, steps=160, batch=2, lr=1e-2, schedule="cosine", weighting="debiased")
"""The paper's layers and rank; shorter, with a higher rate, as the network is small. Each LoRA sees 320 pictures."""
Model = Portraits | FlowPortraits
"""Either of the portraits models."""
FLOW_RECIPE = LoraTrainConfig(
    rank=1,
    alpha=4.0,
    targets=("to_v", "add_v_proj", "proj_mlp", "net.0.proj", "net.2"),
    steps=120,
    batch=2,
    lr=1.5e-2,
    schedule="cosine",
)
"""For the flow portraits: values of picture and text, and the feed-forwards; the loss of the velocity as it is.

Chosen on four people that nothing else uses, after 160 steps at 1e-2 (2e-2): the paper's queries and values, with the
text's, come to an identity of 0.54, with keys to 0.63 (0.62), these to 0.80 (0.80), all linear layers to 0.80.
"""
S = TypeVar("S", bound=Space)
DIRECTION_COMPONENTS = 120
"""For directions that read attributes (the paper's least squares); the paper uses 1,000 for 65,000 models."""
GUIDANCE, STEPS = 2.0, 20

LABELS: dict[str, tuple[str, str]] = {
    "glasses": ("glasses", "glasses"),
    "beard": ("beard", "beard"),
    "bald": ("hair", "bald"),
    "long hair": ("hair", "long"),
    "curly hair": ("hair", "curly"),
    "dark skin": ("skin", "dark"),
    "pale skin": ("skin", "pale"),
    "black hair": ("hair_color", "black"),
    "blond hair": ("hair_color", "blond"),
    "red hair": ("hair_color", "red"),
    "white hair": ("hair_color", "white"),
    "mole left": ("mole", "left"),
    "mole right": ("mole", "right"),
}
"""Label of a direction -> the (attribute, value) that the attribute classifier reads."""
SHAPES = ("head_width", "eye_size", "eye_distance")
"""Geometry with its own directions; its labels are numbers.

Held-out correlation of the best ridge regression on coefficients with the number: 0.94, 0.80 and 0.80. Mouth width
(0.47), hair volume (0.38) and nose width (0.12) are hardly in the weights, and have no slider.
"""
INERT = ("nose_width", "mouth_width", "hair_volume")
"""Geometry that has a label, for other directions to leave alone, and a retired direction (``directions.listed``)."""
EXCLUSIVE = (
    ("bald", "long hair", "curly hair"),
    ("dark skin", "pale skin"),
    ("black hair", "blond hair", "red hair", "white hair"),
)
"""Curly hair replaces the hair there was. A mole on the other cheek may stay."""


def subject(portraits: Model, identity: int, pictures: int = PICTURES, number: int = 0) -> Subject:
    """One person for the trainer: posterior means and captions of the surroundings."""
    dataset = portraits.dataset
    scenes = portraits_of(identity, pictures, dataset=dataset)
    with torch.no_grad():
        text = portraits.encode(dataset.context_caption(scenes))
    return Subject(name(identity), latents_of(portraits, portraits.draw(scenes)), portraits.condition(text), number)


@torch.no_grad()
def latents_of(portraits: Model, images: torch.Tensor) -> torch.Tensor:
    """(B, *latent_shape) scaled posterior means of (B, 3, S, S) in [0, 1]."""
    vae = portraits.vae
    return vae.encode(images * 2 - 1).latent_dist.mean * vae.config.scaling_factor


def name(identity: int) -> str:
    """File name of a person's LoRA."""
    return f"person-{identity - FIRST_IDENTITY:04d}"


def frozen(model: str | None = None) -> tuple[Model, Denoiser]:
    """A portraits model, the 64 px one or a folder's, without its own gradients, and its denoiser."""
    portraits = open_model(model)
    for module in (portraits.backbone, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    return portraits, Denoiser.from_diffusers(portraits)


def recipe_of(portraits: Model) -> LoraTrainConfig:
    """How the people of a model are trained."""
    return FLOW_RECIPE if isinstance(portraits, FlowPortraits) else RECIPE


def train_people(
    folder: str | Path,
    count: int = PEOPLE,
    *,
    together: int = 16,
    progress: Progress = silent,
    part: tuple[int, int] = (0, 1),
    model: str | None = None,
) -> list[Path]:
    """One LoRA for each of ``count`` people of a portraits model; the same call resumes an interrupted run."""
    portraits, denoiser = frozen(model)
    who = [int(i) for i in people(count)]
    encoded_by = digest([portraits.vae, portraits.text_encoder])
    makers = [SubjectMaker(partial(subject, portraits, i), [encoded_by, i, PICTURES]) for i in who]
    names = [name(i) for i in who]
    recipe = recipe_of(portraits)
    return train_loras(denoiser, makers, names, folder, recipe, together=together, progress=progress, part=part)


def labels(names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Label -> (N,) of 0 / 1, or the number for geometry; NaN where a bald head shows no hair."""
    from ...engine.portraits import sample_scenes
    from ...engine.portraits.scenes import ATTRIBUTES, GEOMETRY_NAMES

    scenes = sample_scenes([FIRST_IDENTITY + int(n.rsplit("-", 1)[1]) for n in names])
    bald = torch.from_numpy(scenes.column("hair") == ATTRIBUTES["hair"].index("bald"))
    table = {}
    for label, (attribute, value) in LABELS.items():
        column = torch.from_numpy(scenes.column(attribute) == ATTRIBUTES[attribute].index(value)).float()
        table[label] = torch.where(bald, torch.nan, column) if attribute == "hair_color" else column
    for shape in (*SHAPES, *INERT):
        table[shape.replace("_", " ")] = torch.from_numpy(scenes.geometry[:, GEOMETRY_NAMES.index(shape)])
    return table


def lacking(names: tuple[str, ...], label: str) -> torch.Tensor:
    """(N,) which people lack an attribute; a hair colour only where there is hair."""
    table = labels(names)
    lacks = table[label] == 0
    return lacks & (table["bald"] == 0) if LABELS[label][0] == "hair_color" else lacks


def build_people(folder: str | Path, components: int = 300, progress: Progress = silent) -> Space:
    """The space with its directions, from the folder :func:`train_people` filled."""
    space = build_space(folder, BuildConfig("factors", components), progress).space
    assert isinstance(space, WeightSpace)
    flow = any(layer.path.startswith("transformer_blocks") for layer in space.manifest)
    space = replace(space, info={**space.info, "base": f"vitrine {'flow ' * flow}portraits"})
    return retired(with_directions(space, joint_directions(space, labels(space.names), EXCLUSIVE)))


def retired(space: S) -> S:
    """The space with the directions of ``INERT`` in no list; they work as before where a workflow names them."""
    return replace(space, info={**space.info, "retired": [shape.replace("_", " ") for shape in INERT]})


@lru_cache(maxsize=1)
def people_space() -> WeightSpace:
    """The shipped space of the 64 px portraits."""
    return WeightSpace.load(PEOPLE_SPACE)


@lru_cache(maxsize=1)
def flow_people_space() -> WeightSpace:
    """The shipped space of the flow portraits."""
    return WeightSpace.load(FLOW_PEOPLE_SPACE)


def subspace(space: WeightSpace, count: int) -> WeightSpace:
    """The space of the first ``count`` models, from their weights in the space."""
    if count >= space.count:
        return space
    components = principal_components(Matrix(space.decode(space.coefficients[:count])), PCAConfig())
    return components.space(space.manifest, space.names[:count], space.info)


@dataclass(frozen=True)
class Studio:
    """Samples people of a space in ``steps`` sampler steps and reads what their pictures show.

    Attributes:
        labels: label -> attribute, and its value or values.
        face: file of the projection to identity features.
    """

    portraits: Model
    space: Space
    classifier: AttributeClassifier
    steps: int = STEPS
    labels: Mapping[str, tuple[str, str | tuple[str, ...]]] = field(default_factory=lambda: LABELS)
    face: Path = FACE_FILE

    @classmethod
    def open(cls, model: str | None = None, space: Space | None = None, steps: int = STEPS) -> Studio:
        """With the space that ships for the model, unless another is given, and the shipped attribute classifier."""
        portraits = frozen(model)[0]
        usual = flow_people_space if isinstance(portraits, FlowPortraits) else people_space
        return cls(portraits, space or usual(), load_classifier(), steps)

    def draw(
        self,
        coefficients: torch.Tensor,
        pictures: int = 8,
        first_seed: int = 0,
        late: torch.Tensor | None = None,
        start: float = 1000.0,
        prompts: list[str] | None = None,
        first_context: int = 5000,
    ) -> torch.Tensor:
        """(M, pictures, 3, S, S) in [0, 1] of M models, the same contexts and seeds for each.

        ``late`` models take over from timestep ``start`` down.
        """
        weights, manifest = self.flat(coefficients)
        after = None if late is None else self.flat(late)[0]
        return self.draw_weights(manifest, weights, pictures, first_seed, after, start, prompts, first_context)

    @property
    def manifest(self) -> Manifest:
        """The layout of flat weights."""
        return self.flat(self.space.coefficients[:1])[1]

    def flat(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, Manifest]:
        """(M, D) flat weights of M models, and their manifest."""
        if isinstance(self.space, WeightSpace):
            return self.space.decode(coefficients), self.space.manifest
        loras = [materialise(self.space, row, 8) for row in coefficients]
        manifest = Manifest.of(loras[0])
        return torch.stack([manifest.flatten(x) for x in loras]), manifest

    @torch.no_grad()
    def draw_weights(
        self,
        manifest: Manifest,
        weights: torch.Tensor,
        pictures: int = 8,
        first_seed: int = 0,
        late: torch.Tensor | None = None,
        start: float = 1000.0,
        prompts: list[str] | None = None,
        first_context: int = 5000,
    ) -> torch.Tensor:
        """As :meth:`draw`, from flat weights (M, D)."""
        captions = prompts or self.surroundings(pictures, first_context)
        seeds, batches = list(range(first_seed, first_seed + pictures)), []
        together = 64 // pictures or 1
        for first in range(0, len(weights), together):
            batch = slice(first, first + together)
            models = len(weights[batch])
            before = weights[batch].repeat_interleave(pictures, 0)
            after = None if late is None else late[batch].repeat_interleave(pictures, 0)
            with late_lora(self.portraits.backbone, manifest, before, after, start):
                text, every_seed = captions * models, seeds * models
                latents = sample_latents(self.portraits, text, every_seed, steps=self.steps, guidance=GUIDANCE)
            images = decode(self.portraits, latents)
            batches.append(images.view(models, pictures, *images.shape[1:]))
        return torch.cat(batches)

    def surroundings(self, pictures: int, first_context: int = 5000) -> list[str]:
        """Prompts that say the surroundings only."""
        dataset = self.portraits.dataset
        return dataset.context_caption(portraits_of(FIRST_IDENTITY, pictures, first_context, dataset))

    def latents(self, images: torch.Tensor) -> torch.Tensor:
        """:func:`latents_of` the studio's model."""
        return latents_of(self.portraits, images)

    def read(self, images: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(M, P, 24) identity features and attribute -> (M, P, values) probabilities of (M, P, 3, S, S)."""
        reading = look(self.classifier, images.flatten(0, 1))
        shape = images.shape[:2]
        attributes = {k: v.view(*shape, -1) for k, v in identity_attributes(reading, self.classifier.dataset).items()}
        return identity_features(reading, self.face).view(*shape, -1), attributes

    def likelihood(self, attributes: Mapping[str, torch.Tensor], label: str) -> torch.Tensor:
        """(M, P) probability of a label by the attribute classifier."""
        attribute, wanted = self.labels[label]
        values = self.classifier.dataset.attributes[attribute]
        codes = [values.index(value) for value in ((wanted,) if isinstance(wanted, str) else wanted)]
        return attributes[attribute][..., codes].sum(-1)
