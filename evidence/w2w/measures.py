"""What the claims of W2W measure on the people of the portraits world: identity, attributes, edits, inversions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.progress import Progress, silent
from ...engine.w2w.batched_lora import initial_lora, late_lora
from ...engine.w2w.directions import named
from ...engine.w2w.inversion import InvertConfig, invert
from ...engine.w2w.sampling import SampleConfig
from ...engine.w2w.space import WeightSpace
from ...engine.w2w.train import BatchedTrainer
from .concept_sliders import SliderConfig, train_sliders
from .world import GUIDANCE, LABELS, RECIPE, Studio, subject

WORDS = {label: label for label in LABELS} | {"bald": "bald head", "dark skin": "dark", "pale skin": "pale"}
"""Attributes whose edits are measured, and what captions call them: the prompt baseline says it."""
EDITS = {
    "glasses": (4.5, 700.0), "beard": (3.5, 850.0), "bald": (3.75, 700.0), "long hair": (3.5, 850.0),
    "dark skin": (4.5, 850.0), "pale skin": (3.5, 1000.0), "mole left": (4.5, 850.0), "mole right": (2.85, 850.0),
}  # fmt: skip
"""Strength beyond which an attribute rises no more, and timestep from which the edit acts; for others 4.5 and 1000.

Read on 40 people other than those measured, of the starts 1000, 850 and 700. The official code edits late too.
"""
SLIDER_STRENGTHS = (0.0, 0.5, 1.0, 1.5, 2.0)
WORD_WEIGHTS = (0.0, 0.5, 0.65, 0.8, 1.0)
"""Of the prompt baseline: text states between those of the prompt without the word (0) and with it (1)."""
EDIT_STEPS, EDIT_BATCH = 10, 40
"""Sampler steps where edits are compared, and models drawn at once."""
PEOPLE = SampleConfig(components=100_000, attributes="joined", emphasis=1.5, inherit=0.4)
"""How people are drawn for measurements: all components, attributes as one training model has them, a little more.

Emphasis and inheritance were read on seeds from 2000 on; ``w2w.sampling`` measures those from 0 on.
"""


def distances(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, P, F) identity features -> cosine distances within models (M,) and between pictures of models (M, M - 1)."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    m, p = unit.shape[:2]
    table = 1 - torch.einsum("ipf,jqf->ijpq", unit, unit)
    off = ~torch.eye(p, dtype=torch.bool)
    within = table[range(m), range(m)][:, off].mean(1)
    between = table.mean((2, 3))[~torch.eye(m, dtype=torch.bool)].view(m, m - 1)
    return within, between


def distributions(within: torch.Tensor, between: torch.Tensor) -> dict[str, list[tuple[float, float]]]:
    """Cumulative distributions of both kinds of distances: (distance, share below it) at 41 shares."""
    steps = torch.linspace(0, 1, 41)
    kinds = {"of one model": within, "of two models": between}
    return {
        k: list(zip(torch.quantile(v.flatten(), steps).tolist(), steps.tolist(), strict=True)) for k, v in kinds.items()
    }


def shares(studio: Studio, attributes: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Label -> share of models for which most pictures show it; hair colours among those with hair."""
    hair = studio.likelihood(attributes, "bald").mean(1) < 0.5
    found = {}
    for label, (attribute, _) in LABELS.items():
        has = studio.likelihood(attributes, label).mean(1) > 0.5
        found[label] = float(has[hair].float().mean() if attribute == "hair_color" else has.float().mean())
    return found


# --- editing ------------------------------------------------------------------------------------------------------
def subjects_without(studio: Studio, label: str, count: int) -> torch.Tensor:
    """(count, K) training people without an attribute, spread over the space; hair colours on those with hair."""
    from .world import labels

    table = labels(studio.space.names)
    lacking = table[label] == 0
    if LABELS[label][0] == "hair_color":
        lacking &= table["bald"] == 0
    rows = lacking.nonzero().flatten()
    return studio.space.coefficients[rows[:: max(1, len(rows) // count)][:count]]


@dataclass(frozen=True)
class Sweep:
    """One way to edit at several strengths, for one label. All (S,) over strengths, means over models and pictures.

    Attributes:
        target: probability of the label. others: largest change of any other attribute's distribution, in total
            variation. identity: cosine of identity features to strength 0. pixels: RMS change of the picture.
    """

    label: str
    strengths: tuple[float, ...]
    target: list[float]
    others: list[float]
    identity: list[float]
    pixels: list[float]
    other: str = ""

    def at(self, gain: float) -> tuple[float, float, float] | None:
        """(identity, others, pixels) where the target has risen by ``gain``, by linear interpolation."""
        zero = self.strengths.index(0.0)
        for i in range(zero + 1, len(self.strengths)):
            low, high = self.target[i - 1] - self.target[zero], self.target[i] - self.target[zero]
            if high >= gain:
                w = 1.0 if high == low else (gain - low) / (high - low)
                rows = (self.identity, self.others, self.pixels)
                first, second, third = (row[i - 1] + w * (row[i] - row[i - 1]) for row in rows)
                return first, second, third
        return None


def measure_sweep(studio: Studio, label: str, strengths: Sequence[float], pictures: Sequence[torch.Tensor]) -> Sweep:
    """From the pictures (M, P, 3, 64, 64) at each strength."""
    from ...engine.portraits.identities import identity_similarity

    zero = list(strengths).index(0.0)
    read = [studio.read(images) for images in pictures]
    base, edited = read[zero], LABELS[label][0]
    target, others, identity, pixels, worst = [], [], [], [], ("", 0.0)
    for (features, attributes), images in zip(read, pictures, strict=True):
        target.append(float(studio.likelihood(attributes, label).mean()))
        changes = {
            name: float((value.mean((0, 1)) - base[1][name].mean((0, 1))).abs().sum() / 2)
            for name, value in attributes.items()
            if name != edited and not (edited == "hair" and name == "hair_color")  # a bald head shows no colour
        }
        name = max(changes, key=changes.__getitem__)
        worst = max(worst, (name, changes[name]), key=lambda pair: pair[1])
        others.append(changes[name])
        identity.append(float(identity_similarity(features, base[0]).mean()))
        pixels.append(float((images - pictures[zero]).square().mean().sqrt()))
    return Sweep(label, tuple(strengths), target, others, identity, pixels, worst[0])


def draw_once(
    studio: Studio, weights: torch.Tensor, prompts: Sequence[str] | torch.Tensor, late: torch.Tensor | None = None,
    start: float = 1000.0,
) -> torch.Tensor:  # fmt: skip
    """(M, 1, 3, 64, 64) in [0, 1]: each model (flat weights) with a prompt (or text states) and seed of its own.

    ``late`` weights take over from timestep ``start`` on.

    Many people once tell more about a slider than few people often: whether an attribute comes along is a matter of
    the person.
    """
    from ...engine.portraits.sampling import decode, sample_latents

    out, late = [], weights if late is None else late
    for first in range(0, len(weights), EDIT_BATCH):
        part = slice(first, first + EDIT_BATCH)
        with late_lora(studio.portraits.unet, studio.manifest, weights[part], late[part], start):
            seeds, told = list(range(first, first + len(weights[part]))), prompts[part]
            told = told if isinstance(told, torch.Tensor) else list(told)
            latents = sample_latents(studio.portraits, told, seeds, steps=EDIT_STEPS, guidance=GUIDANCE)
        out.append(decode(studio.portraits, latents))
    return torch.cat(out)[:, None]


@dataclass(frozen=True)
class EditStand:
    """Models without an attribute, their prompts, and what they look like before any edit."""

    studio: Studio
    label: str
    models: torch.Tensor
    prompts: list[str]
    before: torch.Tensor

    @classmethod
    def open(cls, studio: Studio, label: str, count: int) -> EditStand:
        """For ``count`` people."""
        models = subjects_without(studio, label, count)
        told = prompts(len(models))
        return cls(studio, label, models, told, draw_once(studio, studio.flat(models)[0], told))

    def w2w(self) -> Sweep:
        """Sliders along the space's direction, as far as the attribute rises."""
        d, (top, _) = named(self.studio.space, self.label), self._edit
        strengths = [top * i / 4 for i in range(5)]
        return self._sweep(strengths, lambda s: self.studio.flat(self.models + s * d)[0])

    def prompt(self) -> Sweep:
        """The same models, the attribute's word in the prompt from the first step on, at several weights of it.

        The last is the prompt as one writes it; the others show what it would keep if it changed as little as a slider.
        """
        own = self.studio.flat(self.models)[0]
        with torch.no_grad():
            plain = self.studio.portraits.encode(self.prompts)
            words = self.studio.portraits.encode([with_word(p, WORDS[self.label]) for p in self.prompts])
        drawn = [draw_once(self.studio, own, plain.lerp(words, w)) for w in WORD_WEIGHTS[1:]]
        return measure_sweep(self.studio, self.label, WORD_WEIGHTS, [self.before, *drawn])

    def slider(self, slider: torch.Tensor, start: torch.Tensor) -> Sweep:
        """The concept slider's weights added to each model's, at several strengths.

        Slider and models share their initial factors, so the factors' differences add up like the paper's merges.
        """
        flat = self.studio.flat(self.models)[0]
        return self._sweep(SLIDER_STRENGTHS, lambda s: flat + s * (slider - start))

    @property
    def _edit(self) -> tuple[float, float]:
        return EDITS.get(self.label, (4.5, 1000.0))

    def _sweep(self, strengths: Sequence[float], weights: Callable[[float], torch.Tensor]) -> Sweep:
        own, (_, start) = self.studio.flat(self.models)[0], self._edit
        drawn = [draw_once(self.studio, own, self.prompts, weights(s), start) for s in strengths[1:]]
        return measure_sweep(self.studio, self.label, strengths, [self.before, *drawn])


def prompts(pictures: int, first_context: int = 5000) -> list[str]:
    """Prompts of the surroundings."""
    from ...engine.portraits.identities import FIRST_IDENTITY, context_caption, portraits_of

    return context_caption(portraits_of(FIRST_IDENTITY, pictures, first_context))


def with_word(prompt: str, word: str) -> str:
    """A prompt that also says an attribute, where training captions say it."""
    if word in ("dark", "pale"):
        return prompt.replace(" face", f" {word} face")
    return prompt.replace("face with", f"face with {word}")


def baseline_sliders(
    studio: Studio, denoiser: Denoiser, config: SliderConfig | None = None, progress: Progress = silent
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, D) concept sliders in the order of ``WORDS`` and the (D,) weights they started from."""
    from ...engine.portraits import render
    from ...engine.portraits.identities import context_caption, portraits_of

    scenes = [portraits_of(i, 1, 9000 + i) for i in range(64)]
    told = [context_caption(s)[0] for s in scenes]
    with torch.no_grad():
        images = torch.cat([render(s).images for s in scenes])
        latents = studio.portraits.vae.encode(images * 2 - 1).latent_dist.mean
        latents = latents * studio.portraits.vae.config.scaling_factor
        plain = Condition(studio.portraits.encode(told))
        positive = [Condition(studio.portraits.encode([with_word(p, w) for p in told])) for w in WORDS.values()]
    weights, manifest = train_sliders(denoiser, latents, plain, positive, config, progress)
    start = manifest.flatten(initial_lora(denoiser.backbone, alpha=RECIPE.alpha))
    return weights, start


# --- inversion ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Likeness:
    """Identity scores (one for each person), trained numbers and seconds a person of one way to get a model."""

    scores: torch.Tensor
    numbers: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(self.scores.mean())


def likeness(studio: Studio, weights: torch.Tensor, who: Sequence[int], pictures: int = 8) -> torch.Tensor:
    """(M,) cosine between identity features of drawn pictures and of the true person's renders, mean over pictures."""
    from ...engine.portraits import render
    from ...engine.portraits.identities import identity_similarity, portraits_of

    manifest = studio.space.manifest if isinstance(studio.space, WeightSpace) else None
    assert manifest is not None
    features = studio.read(studio.draw_weights(manifest, weights, pictures))[0]
    truth = torch.stack([
        studio.read(render(portraits_of(i, 24, 7000)).images[None])[0][0].mean(0) for i in who
    ])  # fmt: skip
    return identity_similarity(features, truth[:, None]).mean(1)


BARE = "a face"
"""The prompt that says nothing; what "sks person" is in the paper."""


def trained(
    studio: Studio, denoiser: Denoiser, who: Sequence[int], pictures: int, prompt: str | None = None
) -> tuple[torch.Tensor, float]:
    """(M, D) LoRAs trained on so many pictures of each person with the space's recipe, and seconds a person.

    ``prompt`` is said of every picture; None says each picture's surroundings.
    """
    began = time.perf_counter()
    subjects = [subject(studio.portraits, i, pictures) for i in who]
    if prompt is not None:
        with torch.no_grad():
            text = Condition(studio.portraits.encode([prompt]))
        subjects = [replace(s, cond=text) for s in subjects]
    trainer = BatchedTrainer(denoiser, subjects, RECIPE)
    for _ in range(RECIPE.steps):
        trainer.step()
    return trainer.weights.detach(), (time.perf_counter() - began) / len(who)


INVERSION = InvertConfig(steps=120, lr=0.6, batch=4, schedule="cosine", antithetic=True, check_every=30, prior=2e-4)
"""On 16 x 16 latents and 300 components; 480 network rows in all against the 320 of a trained LoRA."""


def inverted(
    studio: Studio, denoiser: Denoiser, images: torch.Tensor, told: list[str], config: InvertConfig = INVERSION,
    space: WeightSpace | None = None,
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """(M, K) coefficients from one picture (M, 3, 64, 64) each, and seconds a picture."""
    with torch.no_grad():
        latents = studio.portraits.vae.encode(images * 2 - 1).latent_dist.mean
        latents = latents * studio.portraits.vae.config.scaling_factor
        cond = Condition(studio.portraits.encode(told))
    began = time.perf_counter()
    found = invert(denoiser, space or studio.space, latents, cond, config)
    return found.coefficients, (time.perf_counter() - began) / len(images)


def pictures_of(who: Sequence[int], context: int = 6000) -> tuple[torch.Tensor, list[str], Any]:
    """One picture of each person, each in a context of its own, with its caption and the rendering."""
    from ...engine.portraits import render
    from ...engine.portraits.identities import context_caption, portraits_of

    scenes = [portraits_of(i, 1, context + k) for k, i in enumerate(who)]
    drawn = [render(s) for s in scenes]
    return torch.cat([d.images for d in drawn]), [context_caption(s)[0] for s in scenes], drawn
