"""People of the portraits world as a space of models: how it is trained, labelled, and what claims measure it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.portraits.shipped import PEOPLE_SPACE
from ...engine.progress import Progress, silent
from ...engine.w2w.batched_lora import late_lora
from ...engine.w2w.build import BuildConfig, Space, build_space
from ...engine.w2w.directions import joint_directions, with_directions
from ...engine.w2w.editing import materialise
from ...engine.w2w.manifest import Manifest
from ...engine.w2w.pca import Matrix, PCAConfig, principal_components
from ...engine.w2w.space import WeightSpace
from ...engine.w2w.train import LoraTrainConfig, Subject, train_loras

PAPER = "weights2weights (Dravid et al., NeurIPS 2024)"
PEOPLE, PICTURES = 520, 16
RECIPE = LoraTrainConfig(rank=1, alpha=4.0, steps=160, batch=2, lr=1e-2, schedule="cosine", weighting="debiased")
"""The paper's layers and rank; shorter, with a higher rate, as the network is small. 320 pictures seen by each LoRA."""
DIRECTION_COMPONENTS = 120
"""For directions that read attributes (the paper's least squares): 1,000 of 65,000 models there."""
GUIDANCE, STEPS = 2.0, 20

LABELS: dict[str, tuple[str, str]] = {
    "glasses": ("glasses", "glasses"), "beard": ("beard", "beard"), "bald": ("hair", "bald"),
    "long hair": ("hair", "long"), "curly hair": ("hair", "curly"),
    "dark skin": ("skin", "dark"), "pale skin": ("skin", "pale"),
    "black hair": ("hair_color", "black"), "blond hair": ("hair_color", "blond"), "red hair": ("hair_color", "red"),
    "white hair": ("hair_color", "white"), "mole left": ("mole", "left"), "mole right": ("mole", "right"),
}  # fmt: skip
"""Label of a direction -> (attribute, value) that the readout can classify."""
SHAPES = ("head_width", "eye_size", "eye_distance", "nose_width", "mouth_width", "hair_volume")
"""Geometry that has a direction too; its labels are numbers."""
EXCLUSIVE = (
    ("bald", "long hair", "curly hair"), ("dark skin", "pale skin"),
    ("black hair", "blond hair", "red hair", "white hair"),
)  # fmt: skip
"""Who gets curly hair gives up what hair there was. A mole on the other cheek may stay."""


def subject(portraits: Any, identity: int, pictures: int = PICTURES, number: int = 0) -> Subject:
    """One person as the trainer wants it: posterior means and captions of the surroundings."""
    from ...engine.portraits.identities import training_pictures

    images, captions, _ = training_pictures(identity, pictures)
    with torch.no_grad():
        latents = portraits.vae.encode(images * 2 - 1).latent_dist.mean * portraits.vae.config.scaling_factor
        text = portraits.encode(captions)
    return Subject(name(identity), latents, Condition(text), number)


def name(identity: int) -> str:
    """File name of a person's LoRA."""
    from ...engine.portraits.identities import FIRST_IDENTITY

    return f"person-{identity - FIRST_IDENTITY:04d}"


def frozen(model: str | None = None) -> tuple[Any, Denoiser]:
    """The portraits model without gradients of its own, and its denoiser."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    for module in (portraits.unet, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    return portraits, Denoiser.from_diffusers(portraits.pipeline())


def train_people(
    folder: str | Path, count: int = PEOPLE, *, together: int = 16, progress: Progress = silent,
    share: tuple[int, int] = (0, 1), model: str | None = None,
) -> list[Path]:  # fmt: skip
    """One LoRA for each of ``count`` people; goes on where it was stopped."""
    from ...engine.portraits.identities import people

    portraits, denoiser = frozen(model)
    who = [int(i) for i in people(count)]
    made = [lambda i=i: subject(portraits, i) for i in who]
    names = [name(i) for i in who]
    return train_loras(denoiser, made, names, folder, RECIPE, together=together, progress=progress, share=share)


def labels(names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Label -> (N,) of 0 / 1, or the number for ``SHAPES``; NaN where a bald head shows no hair."""
    from ...engine.portraits import sample_scenes
    from ...engine.portraits.identities import FIRST_IDENTITY
    from ...engine.portraits.scenes import ATTRIBUTES, GEOMETRY_NAMES

    scenes = sample_scenes([FIRST_IDENTITY + int(n.rsplit("-", 1)[1]) for n in names])
    bald = torch.from_numpy(scenes.column("hair") == ATTRIBUTES["hair"].index("bald"))
    found = {}
    for label, (attribute, value) in LABELS.items():
        column = torch.from_numpy(scenes.column(attribute) == ATTRIBUTES[attribute].index(value)).float()
        found[label] = torch.where(bald, torch.nan, column) if attribute == "hair_color" else column
    for shape in SHAPES:
        found[shape.replace("_", " ")] = torch.from_numpy(scenes.geometry[:, GEOMETRY_NAMES.index(shape)])
    return found


def build_people(folder: str | Path, components: int = 300, progress: Progress = silent) -> Space:
    """The space with its directions, from the folder :func:`train_people` filled."""
    space = build_space(folder, BuildConfig("factors", components, base="vitrine portraits"), progress).space
    return with_directions(space, joint_directions(space, labels(space.names), EXCLUSIVE))


@lru_cache(maxsize=1)
def people_space() -> WeightSpace:
    """The shipped space."""
    return WeightSpace.load(PEOPLE_SPACE)


def subspace(space: WeightSpace, count: int) -> WeightSpace:
    """The space of the first ``count`` models, from their weights as the space holds them."""
    if count >= space.count:
        return space
    rows = space.decode(space.coefficients[:count])
    found = principal_components(Matrix(rows), PCAConfig())
    parts = (found.mean, found.scale, found.basis, found.singular_values, found.coefficients, count)
    return WeightSpace(space.manifest, *parts, space.names[:count], {}, found.total_variance, dict(space.info))


@dataclass(frozen=True)
class Studio:
    """Draws people of a space and reads what the pictures show."""

    portraits: Any
    space: Space
    readout: Any

    @classmethod
    def open(cls, model: str | None = None, space: Space | None = None) -> Studio:
        """With the shipped model, space and readout."""
        from ...engine.portraits.readout import load_readout

        return cls(frozen(model)[0], space or people_space(), load_readout())

    def draw(
        self, coefficients: torch.Tensor, pictures: int = 8, first_seed: int = 0, late: torch.Tensor | None = None,
        start: float = 1000.0, prompts: list[str] | None = None, first_context: int = 5000,
    ) -> torch.Tensor:  # fmt: skip
        """(M, pictures, 3, 64, 64) in [0, 1] of M models, the same contexts and seeds for each.

        ``late`` models take over from timestep ``start`` on.
        """
        before = self.flat(coefficients)
        manifest = before[1]
        after = before[0] if late is None else self.flat(late)[0]
        return self.draw_weights(manifest, before[0], pictures, first_seed, after, start, prompts, first_context)

    @property
    def manifest(self) -> Manifest:
        """Of flat weights."""
        return self.flat(self.space.coefficients[:1])[1]

    def flat(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, Manifest]:
        """(M, D) weights of M models and their manifest."""
        if isinstance(self.space, WeightSpace):
            return self.space.decode(coefficients), self.space.manifest
        loras = [materialise(self.space, row, 8) for row in coefficients]
        manifest = Manifest.of(loras[0])
        return torch.stack([manifest.flatten(x) for x in loras]), manifest

    @torch.no_grad()
    def draw_weights(
        self, manifest: Manifest, weights: torch.Tensor, pictures: int = 8, first_seed: int = 0,
        late: torch.Tensor | None = None, start: float = 1000.0, prompts: list[str] | None = None,
        first_context: int = 5000,
    ) -> torch.Tensor:  # fmt: skip
        """As :meth:`draw`, from flat weights (M, D)."""
        from ...engine.portraits.identities import FIRST_IDENTITY, context_caption, portraits_of
        from ...engine.portraits.sampling import decode, sample_latents

        told = prompts or context_caption(portraits_of(FIRST_IDENTITY, pictures, first_context))
        seeds, out = list(range(first_seed, first_seed + pictures)), []
        after = weights if late is None else late
        for chunk, end in zip(weights.split(64 // pictures or 1), after.split(64 // pictures or 1), strict=True):
            rows, ends = (w.repeat_interleave(pictures, 0) for w in (chunk, end))
            with late_lora(self.portraits.unet, manifest, rows, ends, start):
                told_all, seeds_all = told * len(chunk), seeds * len(chunk)
                latents = sample_latents(self.portraits, told_all, seeds_all, steps=STEPS, guidance=GUIDANCE)
            out.append(decode(self.portraits, latents).view(len(chunk), pictures, 3, 64, 64))
        return torch.cat(out)

    def read(self, images: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(M, P, 24) identity features and attribute -> (M, P, values) probabilities of (M, P, 3, 64, 64)."""
        from ...engine.portraits.identities import identity_attributes, identity_features
        from ...engine.portraits.readout import read

        reading = read(self.readout, images.flatten(0, 1))
        shape = images.shape[:2]
        attributes = {k: v.view(*shape, -1) for k, v in identity_attributes(reading).items()}
        return identity_features(reading).view(*shape, -1), attributes

    def likelihood(self, attributes: Mapping[str, torch.Tensor], label: str) -> torch.Tensor:
        """(M, P) probability the classifier gives to a label of ``LABELS``."""
        from ...engine.portraits.scenes import ATTRIBUTES

        attribute, value = LABELS[label]
        return attributes[attribute][..., ATTRIBUTES[attribute].index(value)]
