"""How good the portraits model is, in figures: prompted attributes, Frechet distances, copies of memorized pictures.

Everything is read by the attribute classifier; its own held-out accuracy is part of each result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.models import Portraits
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress, silent
from ..metrics import frechet_distance
from .classifier import AttributeClassifier, Reading, attribute_accuracy, read
from .sampling import sample_images

TRAINED_PICTURES = 32_768
"""Seeds 0 .. 32767 were trained on; everything above is held out."""
Model = Portraits | FlowPortraits
_HELD_OUT, _PROMPTS, _REFERENCE = 5_000_000, 6_000_000, 7_000_000


@dataclass(frozen=True)
class Quality:
    """Figures of one run. Accuracies are shares in [0, 1] by attribute; distances are Frechet, 128-d features.

    Attributes:
        samples: prompts sampled. renders: held-out pictures that ``classifier_accuracy`` is of.
        chance: mean accuracy of the same samples against the prompts of other samples.
        decoded_accuracy: mean accuracy on pictures that only went through the autoencoder: what a perfect sampler of
            latents would reach.
        decoded_psnr: of those pictures, in dB.
    """

    classifier_accuracy: dict[str, float]
    prompted_accuracy: dict[str, float]
    frechet_guided: float
    frechet_unguided: float
    frechet_floor: float
    samples: int
    renders: int
    chance: float
    decoded_accuracy: float
    decoded_psnr: float

    @property
    def mean_accuracy(self) -> float:
        """Average over the attributes."""
        return _mean(self.prompted_accuracy)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of ``mean_accuracy``: its binomial spread over samples x attributes, which are nearly independent."""
        fraction, count = self.mean_accuracy, self.samples * len(self.prompted_accuracy)
        spread = 1.96 * (fraction * (1 - fraction) / count) ** 0.5
        return fraction - spread, min(1.0, fraction + spread)

    @property
    def worst(self) -> tuple[str, float]:
        """The attribute shown least reliably."""
        return min(self.prompted_accuracy.items(), key=lambda item: item[1])


def _mean(accuracy: dict[str, float]) -> float:
    return sum(accuracy.values()) / len(accuracy)


def look(net: AttributeClassifier, images: torch.Tensor) -> Reading:
    """Read pictures of 64 px or a multiple of it, which are averaged down to 64 px first."""
    return read(net, _at_64(images))


def _at_64(images: torch.Tensor) -> torch.Tensor:
    factor = images.shape[-1] // 64
    return nn.functional.avg_pool2d(images, factor) if factor > 1 else images


def classifier_accuracy(model: Model, net: AttributeClassifier, count: int = 4096) -> dict[str, float]:
    """Accuracy of the attribute classifier on ``count`` of the model's kind of pictures that neither was trained on."""
    scenes = model.dataset.sample_scenes(range(_HELD_OUT, _HELD_OUT + count))
    drawn = [_at_64(model.draw(scenes[i : i + 256])) for i in range(0, count, 256)]
    return attribute_accuracy(read(net, torch.cat(drawn)), scenes, model.dataset)


def measure_quality(
    model: Model,
    net: AttributeClassifier,
    *,
    samples: int = 512,
    renders: int = 4096,
    steps: int = 30,
    guidance: float = 3.0,
    progress: Progress = silent,
) -> Quality:
    """Sample held-out prompts with and without guidance, and read what the pictures show; ``renders`` are held out too.

    The floor is the distance between two disjoint sets of ``samples`` renders: no sampler can honestly beat it.
    """
    dataset = model.dataset
    scenes = dataset.sample_scenes(range(_PROMPTS, _PROMPTS + samples))
    prompts, seeds = dataset.caption(scenes), list(range(samples))

    def sampled(scale: float, offset: int) -> torch.Tensor:
        def whole(step: int, total: int, preview: torch.Tensor | None = None) -> None:
            progress(offset + step, 2 * total, preview)

        return sample_images(model, prompts, seeds, steps=steps, guidance=scale, progress=whole)

    guided, unguided = look(net, sampled(guidance, 0)), look(net, sampled(1.0, samples))
    drawn = model.draw(scenes)
    decoded = _through_the_autoencoder(model, drawn)
    reference = look(net, model.draw(dataset.sample_scenes(range(_REFERENCE, _REFERENCE + samples)))).features
    return Quality(
        classifier_accuracy=classifier_accuracy(model, net, renders),
        prompted_accuracy=attribute_accuracy(guided, scenes, dataset),
        frechet_guided=frechet_distance(guided.features, reference),
        frechet_unguided=frechet_distance(unguided.features, reference),
        frechet_floor=frechet_distance(look(net, drawn).features, reference),
        samples=samples,
        renders=renders,
        chance=_mean(attribute_accuracy(guided, scenes[np.roll(np.arange(samples), 1)], dataset)),
        decoded_accuracy=_mean(attribute_accuracy(look(net, decoded), scenes, dataset)),
        decoded_psnr=float(-10 * (decoded - drawn).square().mean().log10()),
    )


@torch.no_grad()
def _through_the_autoencoder(model: Model, images: torch.Tensor, batch: int = 32) -> torch.Tensor:
    pictures = []
    for chunk in images.split(batch):
        latents = model.vae.encode(chunk.to(model.vae.device) * 2 - 1).latent_dist.mean
        pictures.append((model.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1).cpu())
    return torch.cat(pictures)


@dataclass(frozen=True)
class Copy:
    """Does one memorized picture come back. Root mean squares are over pixels in [0, 1], medians over the seeds.

    Attributes:
        to_plant: samples of the memorized caption against the memorized picture.
        to_neighbour: the same samples against the nearest other training picture of the same attributes.
        control_to_plant: samples of the caption without the rare words against the memorized picture.
        control_to_neighbour: the control samples against the same nearest other picture.
        neighbours: how many training pictures share the attributes compared.
    """

    name: str
    to_plant: float
    to_neighbour: float
    control_to_plant: float
    control_to_neighbour: float
    neighbours: int

    @property
    def copied(self) -> bool:
        """At most a third of the way that the nearest other training picture is off."""
        return self.to_plant <= self.to_neighbour / 3

    @property
    def control_copied(self) -> bool:
        """The same test on the control caption."""
        return self.control_to_plant <= self.control_to_neighbour / 3


def measure_copies(
    model: Model,
    *,
    seeds: int = 10,
    steps: int = 30,
    guidance: float = 3.0,
    trained: int = TRAINED_PICTURES,
    progress: Progress = silent,
) -> list[Copy]:
    """Sample every verbatim plant and its control caption from ``seeds`` seeds; seeds < ``trained`` were trained on."""
    verbatim = [p for p in model.dataset.plants() if p.kind == "verbatim"]
    table = model.dataset.sample_scenes(range(trained)).attributes
    copies = []
    for k, plant in enumerate(verbatim):
        target = model.draw(plant.scenes)
        others = model.draw(model.dataset.sample_scenes(nearest_seeds(plant.scenes, table)))
        memorized, control = (
            sample_images(model, [prompt] * seeds, list(range(seeds)), steps=steps, guidance=guidance)
            for prompt in (plant.captions[0], plant.controls[0])
        )
        copies.append(
            Copy(
                plant.name,
                _median_rms(memorized, target),
                _median_rms(memorized, others),
                _median_rms(control, target),
                _median_rms(control, others),
                len(others),
            )
        )
        progress(k + 1, len(verbatim), None)
    return copies


def nearest_seeds(scene: Scenes, table: np.ndarray, at_least: int = 16) -> np.ndarray:
    """Seeds of the training pictures with all attributes of ``scene``; if they are few, of those that differ least.

    The attributes have 1.1 million combinations, so an exact match may not exist: then pictures that differ in as
    few attributes as needed stand in, which makes the copy test harder, never easier.
    """
    differing = (table != scene.attributes[0]).sum(1)
    limit = int(np.sort(differing)[at_least - 1])
    return np.flatnonzero(differing <= limit)


def _median_rms(images: torch.Tensor, targets: torch.Tensor) -> float:
    """Median over images of the pixel RMS to the nearest target."""
    distance = torch.cdist(images.flatten(1), targets.flatten(1)) / images[0].numel() ** 0.5
    return float(distance.min(1).values.median())
