"""Evaluation of one-step students of the portraits model: captions of unseen scenes, real renders of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...engine.diffusion.noise import seeded_noise
from ...engine.errors import refuse
from ...engine.network.condition import Condition
from ..metrics import frechet_distance, precision_recall

if TYPE_CHECKING:
    from ...engine.portraits import Portraits, Scenes
    from ..portraits.classifier import AttributeClassifier

BATCH, SHAPE = 50, (4, 16, 16)
QUICK_SAMPLES, QUICK_DISTANCE, QUICK_RECALL = 100, 4.2, 0.06
"""Samples of a quick claim, and differences by chance (95 %) of two Frechet distances and of two recalls of that size:
30 sets of real renders have standard deviations of 1.5 and 0.022."""
Generate = Callable[[torch.Tensor, Condition], torch.Tensor]
"""Noise (B, 4, 16, 16) and prompts to scaled latents of the same shape."""


@dataclass
class Judge:
    """Captions to sample, their text states, and features of twice as many renders of other scenes.

    With fewer samples the Frechet distance is mostly the bias of small sets: real against real gives 21 at 100, 4.5 at
    500 and 2.0 at 1,000.

    Attributes:
        scenes: N of them; the seed of the i-th picture is i.
        prompts: their captions.
        text: (N, 24, 64) text states.
        real: (2 N, D) attribute classifier features of the renders.
        classifier: the attribute classifier.
    """

    portraits: Portraits
    scenes: Scenes
    prompts: list[str]
    text: torch.Tensor
    real: torch.Tensor
    classifier: AttributeClassifier

    @classmethod
    def open(cls, first: int, count: int, model: str | None = None) -> Judge:
        """Scenes ``first`` to ``first + count``; the reference is the next ``2 * count``."""
        from ...engine.portraits import Portraits
        from ..portraits.avataaars import open_model
        from ..portraits.classifier import classifier_of, read

        portraits = open_model(model)
        if not isinstance(portraits, Portraits):
            raise refuse("model", model, "a 64 px model's folder", "leave it out for the portraits")
        classifier, dataset = classifier_of(portraits), portraits.dataset
        scenes, others = dataset.sample_scenes(range(first, first + count)), range(first + count, first + 3 * count)
        prompts = dataset.caption(scenes)
        with torch.no_grad():
            text = torch.cat([portraits.encode(prompts[i : i + BATCH]) for i in range(0, count, BATCH)])
        real = read(classifier, portraits.draw(dataset.sample_scenes(others))).features
        return cls(portraits, scenes, prompts, text, real, classifier)

    @torch.no_grad()
    def draw(self, generate: Generate) -> tuple[torch.Tensor, float]:
        """(N, 3, 64, 64) pictures in [0, 1], and the seconds spent in ``generate``."""
        from ..portraits.sampling import decode

        start, latents = time.perf_counter(), []
        for i in range(0, len(self.text), BATCH):
            seeds = list(range(i, min(i + BATCH, len(self.text))))
            latents.append(generate(seeded_noise(seeds, SHAPE), Condition(self.text[i : i + BATCH])))
        seconds = time.perf_counter() - start
        return decode(self.portraits, torch.cat(latents)), seconds

    def distance(self, images: torch.Tensor) -> float:
        """Frechet distance of (N, 3, 64, 64) pictures in [0, 1] to the renders, on attribute classifier features."""
        from ..portraits.classifier import read

        return frechet_distance(read(self.classifier, images).features, self.real)

    def row(self, images: torch.Tensor, seconds: float) -> dict[str, float]:
        """Distance, precision, recall, agreement with the captions, time."""
        from ..portraits.classifier import attribute_accuracy, read

        reading = read(self.classifier, images)
        accuracy = attribute_accuracy(reading, self.scenes, self.portraits.dataset)
        precision, recall = precision_recall(self.real, reading.features)
        return {
            "FID": round(frechet_distance(reading.features, self.real), 2),
            "precision": round(precision, 3),
            "recall": round(recall, 3),
            "agreement": round(sum(accuracy.values()) / len(accuracy), 4),
            "ms an image": round(1000 * seconds / len(images), 1),
        }
