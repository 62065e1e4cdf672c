"""Edits compared: sliders of the space, words in the prompt, and concept sliders, on the same people and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.train.batched_lora import initial_lora
from ..portraits.identities import context_caption, identity_similarity, portraits_of
from .concept_sliders import SliderConfig, train_sliders
from .drawing import EDIT_STEPS, WORDS, with_word
from .graded import MEASURED, TUNED_ON, Sitting
from .measures import side_effects, variation
from .people import LABELS, RECIPE, Studio

SLIDER_STRENGTHS = (0.0, 0.5, 1.0, 1.5, 2.0)
WORD_WEIGHTS = (0.0, 0.5, 0.65, 0.8, 1.0)
"""Of the prompt baseline: text states between those of the prompt without the word (0) and with it (1)."""


@dataclass(frozen=True)
class Sweep:
    """One way to edit one attribute, at several strengths; all (S,), means over models and pictures.

    Attributes:
        target: probability of the label.
        others: largest change of any other attribute's distribution, in total variation.
        identity: cosine of identity features to strength 0.
        pixels: RMS change of the picture.
        other: the attribute that changes most along with it.
    """

    label: str
    strengths: tuple[float, ...]
    target: list[float]
    others: list[float]
    identity: list[float]
    pixels: list[float]
    other: str = ""

    @property
    def rise(self) -> float:
        """How far the target rises from the first strength to the last."""
        return self.target[-1] - self.target[0]

    def at(self, gain: float) -> tuple[float, float, float] | None:
        """(identity, others, pixels) where the target has risen by ``gain``, by linear interpolation."""
        zero = self.strengths.index(0.0)
        for i in range(zero + 1, len(self.strengths)):
            low, high = self.target[i - 1] - self.target[zero], self.target[i] - self.target[zero]
            if high >= gain:
                w = 1.0 if high == low else (gain - low) / (high - low)
                curves = (self.identity, self.others, self.pixels)
                identity, others, pixels = (c[i - 1] + w * (c[i] - c[i - 1]) for c in curves)
                return identity, others, pixels
        return None


def measure_sweep(studio: Studio, label: str, strengths: Sequence[float], pictures: Sequence[torch.Tensor]) -> Sweep:
    """From the pictures (M, P, 3, S, S) at each strength."""
    zero = list(strengths).index(0.0)
    readings = [studio.read(images) for images in pictures]
    base, edited = readings[zero], LABELS[label][0]
    target, others, identity, pixels, most = [], [], [], [], ("", 0.0)
    for (features, attributes), images in zip(readings, pictures, strict=True):
        target.append(float(studio.likelihood(attributes, label).mean()))
        changes = {name: variation(change) for name, change in side_effects(base[1], attributes, edited).items()}
        name = max(changes, key=changes.__getitem__)
        most = max(most, (name, changes[name]), key=lambda pair: pair[1])
        others.append(changes[name])
        identity.append(float(identity_similarity(features, base[0]).mean()))
        pixels.append(float((images - pictures[zero]).square().mean().sqrt()))
    return Sweep(label, tuple(strengths), target, others, identity, pixels, most[0])


@dataclass(frozen=True)
class EditStand:
    """People of neither the space nor the tuning who lack an attribute, and three ways to give it to them.

    Attributes:
        sitting: the people.
        end: the strength at which the space's slider ends, as the tuning people say.
        start: timestep from which edits act, as these say too.
    """

    sitting: Sitting
    end: float
    start: float

    @classmethod
    def open(cls, studio: Studio, label: str, count: int, tuning: int = 24) -> EditStand:
        """For ``count`` people, after ``tuning`` others; the studio's space is :func:`.graded.smaller_space`."""
        points = Sitting.open(studio, label, TUNED_ON, tuning, EDIT_STEPS).tuned()
        return cls(Sitting.open(studio, label, MEASURED, count, EDIT_STEPS), points.strengths[-1], points.start)

    def w2w(self) -> Sweep:
        """Sliders along the space's direction, as far as the attribute rises."""
        strengths = [self.end * i / 4 for i in range(5)]
        return self._sweep(strengths, [self.sitting.moved(s, start=self.start) for s in strengths])

    def prompt(self) -> Sweep:
        """The same models, with the attribute's word in the prompt from the first step on, at several weights of it.

        The last weight is the prompt as one writes it; the others show what it would keep if it changed as little as a
        slider.
        """
        return self._sweep(WORD_WEIGHTS, [self.sitting.worded(w) for w in WORD_WEIGHTS])

    def slider(self, slider: torch.Tensor, start: torch.Tensor) -> Sweep:
        """The concept slider's weights added to each model's, at several strengths.

        Slider and models share their initial factors, so the factors' differences add up like the paper's merges.
        """
        change = slider - start
        return self._sweep(SLIDER_STRENGTHS, [self.sitting.moved(s, change, self.start) for s in SLIDER_STRENGTHS])

    def _sweep(self, strengths: Sequence[float], pictures: Sequence[torch.Tensor]) -> Sweep:
        return measure_sweep(self.sitting.studio, self.sitting.label, strengths, pictures)


def baseline_sliders(
    studio: Studio,
    denoiser: Denoiser,
    labels: Sequence[str],
    config: SliderConfig | None = None,
    progress: Progress = silent,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, D) concept sliders of the labels, and the (D,) weights they started from."""
    from ...engine.portraits import render

    scenes = [portraits_of(i, 1, 9000 + i) for i in range(64)]
    captions = [context_caption(s)[0] for s in scenes]
    latents = studio.latents(torch.cat([render(s).images for s in scenes]))
    with torch.no_grad():
        plain = Condition(studio.portraits.encode(captions))
        words = [[with_word(p, WORDS[label]) for p in captions] for label in labels]
        positive = [Condition(studio.portraits.encode(prompts)) for prompts in words]
    weights, manifest = train_sliders(denoiser, latents, plain, positive, config, progress)
    start = manifest.flatten(initial_lora(denoiser.backbone, alpha=RECIPE.alpha))
    return weights, start


def compare(own: Sweep, prompt: Sweep, slider: Sweep, tolerance: float = 0.10) -> tuple[dict[str, Any], bool, bool]:
    """The paper's table for one attribute, whether the edit passes, and whether it does against weighted words too.

    Slider and w2w are compared where the target has risen by 60 points (or as far as the weaker of them reaches), the
    prompt as it is written: it has no strength. A word can be weighted all the same, a harder comparison.

    Args:
        tolerance: how much other attributes may change at +60 points.
    """
    steady = all(b >= a - 0.01 for a, b in zip(own.target, own.target[1:], strict=False))
    common = max(0.05, min(0.6, own.rise, max(slider.target) - slider.target[0]))
    at_60, ours, theirs, weighted = own.at(0.6), own.at(common), slider.at(common), prompt.at(common)
    written = prompt.identity[-1], prompt.others[-1], prompt.pixels[-1]
    better = ours is not None and ours[0] > written[0] and (theirs is None or ours[0] > theirs[0])
    harder = better and (weighted is None or ours is None or ours[0] > weighted[0])
    rows = {
        "w2w": (ours, common),
        "prompt": (written, prompt.rise),
        "slider": (theirs, common),
        "prompt, weighted": (weighted, common),
    }
    others = "-" if at_60 is None else f"{at_60[1]:.3f} (most: {own.other})"
    table: dict[str, Any] = {"target by strength": [round(v, 3) for v in own.target], "others at +60": others}
    table |= {name: "-" if row is None else measured_at(row, gain) for name, (row, gain) in rows.items()}
    steady = steady and at_60 is not None and at_60[1] <= tolerance
    return table, steady and better, steady and harder


def edit_rows(details: Mapping[str, Any], columns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """A row for each attribute: what :func:`measured_at` gives of each way to edit."""
    return tuple((label, *(str(table[column]) for column in columns)) for label, table in details.items())


def measured_at(row: tuple[float, float, float], gain: float) -> str:
    """A row of the table: what :meth:`Sweep.at` gives, where the target has risen by ``gain``."""
    identity, others, pixels = row
    return f"identity {identity:.3f}, others {others:.3f}, pixels {pixels:.3f}, target +{gain:.0%}"
