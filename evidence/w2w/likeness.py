"""Ways from pictures of a person to a model, and how like that person its pictures are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.w2w.edit.coefficient_sampling import nearest
from ...engine.w2w.edit.inversion import InvertConfig, invert
from ...engine.w2w.space.space import WeightSpace
from ...engine.w2w.train.lora_trainer import BatchedTrainer
from ..intervals import mean_interval
from ..portraits.identities import FIRST_IDENTITY, context_caption, identity_similarity, portraits_of
from ..registry import Arm, arms
from .measures import distances
from .people import Model, Studio, recipe_of, subject

FIRST_HELD_OUT = 5000
"""People from here on (after the first identity) are in no space."""
PEOPLE_AT_ONCE = 8
"""People inverted or trained at once."""
PLAIN_PROMPT = "a face"
"""The prompt that says nothing; what "sks person" is in the paper."""
INVERSION = InvertConfig(steps=120, lr=0.6, batch=4, schedule="cosine", antithetic=True, check_every=30, prior=2e-4)
"""On 16 x 16 latents and 300 components; 480 network rows in all, against the 320 of a trained LoRA."""


@dataclass(frozen=True)
class Likeness:
    """One way to get a model: identity scores (one per person), trained numbers, and seconds a person."""

    scores: torch.Tensor
    numbers: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(self.scores.mean())

    def described(self) -> str:
        """One line of a table, with the mean's 95 % interval over people."""
        low, high = mean_interval(self.scores)
        shown = f"identity {self.mean:.3f} ({low:.3f} to {high:.3f}, {len(self.scores)} people)"
        return f"{shown}, {self.numbers} numbers, {self.seconds:.1f} s a person"


@dataclass(frozen=True)
class Sitters:
    """Held-out people, with one picture of each in its own context.

    Attributes:
        images: (M, 3, S, S) in [0, 1]; ``captions`` say their surroundings.
        who: their identities.
    """

    studio: Studio
    denoiser: Denoiser
    who: list[int]
    images: torch.Tensor
    captions: list[str]

    @classmethod
    def open(cls, studio: Studio, count: int) -> Sitters:
        """The first ``count`` people that are in no space."""
        who = [FIRST_IDENTITY + FIRST_HELD_OUT + i for i in range(count)]
        images, captions = pictures_of(studio.portraits, who)
        return cls(studio, Denoiser.from_diffusers(studio.portraits), who, images, captions)

    def first(self, count: int) -> Sitters:
        """The first ``count`` of them."""
        return self.part(slice(count))

    def part(self, which: slice) -> Sitters:
        """Some of them, with the same pictures."""
        return replace(self, who=self.who[which], images=self.images[which], captions=self.captions[which])

    def inverted(
        self,
        config: InvertConfig = INVERSION,
        space: WeightSpace | None = None,
        prompt: str | None = None,
        images: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, float]:
        """(M, K) coefficients from the one picture of each person, and seconds a picture.

        ``prompt`` is said of every picture; None says each picture's surroundings.
        """
        latents = self.studio.latents(self.images if images is None else images)
        with torch.no_grad():
            prompts = self.captions if prompt is None else [prompt] * len(self.who)
            cond = self.studio.portraits.condition(self.studio.portraits.encode(prompts))
        began = time.perf_counter()
        result = invert(self.denoiser, space or self.studio.space, latents, cond, config)
        return result.coefficients, (time.perf_counter() - began) / len(latents)

    def trained(self, pictures: int, prompt: str | None = None) -> tuple[torch.Tensor, float]:
        """(M, D) LoRAs trained with the space's recipe on that many pictures of each person, and seconds a person."""
        began = time.perf_counter()
        portraits = self.studio.portraits
        subjects, recipe = [subject(portraits, i, pictures) for i in self.who], recipe_of(portraits)
        if prompt is not None:
            with torch.no_grad():
                text = portraits.condition(portraits.encode([prompt]))
            subjects = [replace(s, cond=text) for s in subjects]
        trainer = BatchedTrainer(self.denoiser, subjects, recipe)
        for _ in range(recipe.steps):
            trainer.step()
        # the space may count a LoRA's scale into its factors
        weights = torch.stack([self.studio.manifest.flatten(lora) for lora in trainer.loras()])
        return weights, (time.perf_counter() - began) / len(self.who)

    def likeness(self, weights: torch.Tensor, pictures: int = 8) -> torch.Tensor:
        """(M,) cosine between identity features of sampled pictures and of the person's renders, mean over pictures."""
        studio = self.studio
        features = studio.read(studio.draw_weights(studio.manifest, weights, pictures))[0]
        truth = torch.stack(
            [studio.read(studio.portraits.draw(portraits_of(i, 24, 7000))[None])[0][0].mean(0) for i in self.who]
        )
        return identity_similarity(features, truth[:, None]).mean(1)

    def likeness_of(self, coefficients: torch.Tensor) -> float:
        """Mean likeness of models of the studio's space."""
        return float(self.likeness(self.studio.flat(coefficients)[0]).mean())

    def three_ways(self, prompt: str | None) -> dict[str, Likeness]:
        """Inversion, a LoRA of 20 pictures, a LoRA of one; ``prompt`` for all pictures, or each its own."""
        parts = [self.part(slice(i, i + PEOPLE_AT_ONCE)) for i in range(0, len(self.who), PEOPLE_AT_ONCE)]
        each = [part._three_ways(prompt) for part in parts]
        return {
            name: Likeness(
                torch.cat([ways[name].scores for ways in each]),
                way.numbers,
                sum(ways[name].seconds * len(part.who) for ways, part in zip(each, parts, strict=True)) / len(self.who),
            )
            for name, way in each[0].items()
        }

    def _three_ways(self, prompt: str | None) -> dict[str, Likeness]:
        return {
            name: Likeness(self.likeness(weights), numbers, seconds)
            for name, (weights, numbers, seconds) in self._found(prompt).items()
        }

    def _found(self, prompt: str | None) -> dict[str, tuple[torch.Tensor, int, float]]:
        """Name of each way -> (M, D) weights, trained numbers, seconds a person."""
        coefficients, seconds = self.inverted(prompt=prompt)
        fitted = {"inversion, 1 picture": (self.studio.flat(coefficients)[0], self.studio.space.dimension, seconds)}
        for count, name in ((20, "LoRA, 20 pictures"), (1, "LoRA, 1 picture")):
            weights, spent = self.trained(count, prompt)
            fitted[name] = (weights, weights.shape[1], spent)
        return fitted

    def by_components(self, counts: Sequence[int] = (10, 30, 100)) -> dict[int, float]:
        """Number of components -> mean likeness of inversions."""
        scores = {}
        for count in counts:
            coefficients, _ = self.inverted(replace(INVERSION, components=count))
            scores[count] = round(self.likeness_of(coefficients), 3)
        return scores

    def in_another_style(self) -> dict[str, Any]:
        """Gray pictures with inked edges: does inversion still land on a person, and on this one?"""
        gray = self.images.mean(1, keepdim=True)
        edges = (gray - torch.nn.functional.avg_pool2d(gray, 3, 1, 1)).abs().clamp(max=0.15) * 4
        drawing = (gray - edges).clamp(0, 1).expand(-1, 3, -1, -1)
        studio, config = self.studio, replace(INVERSION, prior=0.1)
        coefficients, _ = self.inverted(config, images=drawing)
        length = (coefficients / studio.space.deviations).square().mean(1).sqrt()
        usual = (studio.space.coefficients / studio.space.deviations).square().mean(1).sqrt()
        features, _ = studio.read(studio.draw(coefficients, 6))
        within, between = distances(features)
        near = [n[0].cosine for n in nearest(studio.space, coefficients)]
        return {
            "identity": round(self.likeness_of(coefficients), 3),
            "deviations from the mean": f"{float(length.mean()):.2f} (training models {float(usual.mean()):.2f})",
            "distance within / between": f"{float(within.mean()):.3f} / {float(between.mean()):.3f}",
            "nearest training model, cosine": round(sum(near) / len(near), 3),
        }


def likeness_arms(ways: Mapping[str, Likeness]) -> tuple[Arm, ...]:
    """Inversion and trained LoRAs, with intervals over people."""
    roles = {name: "ours" if name.startswith("inversion") else "rival" for name in ways}
    spans = {name: mean_interval(way.scores) for name, way in ways.items()}
    return arms({name: way.mean for name, way in ways.items()}, roles, spans)


def pictures_of(portraits: Model, who: Sequence[int], context: int = 6000) -> tuple[torch.Tensor, list[str]]:
    """One picture of each person (M, 3, S, S), each in its own context, and its caption."""
    scenes = [portraits_of(i, 1, context + k) for k, i in enumerate(who)]
    return torch.cat([portraits.draw(s) for s in scenes]), [context_caption(s)[0] for s in scenes]
