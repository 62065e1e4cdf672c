"""The training set, whole in memory: renders, ground truth and token ids of N seeds, then the injected pictures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...engine.jobs.run import Run
from ...engine.portraits.captions import MAX_TOKENS
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.plants import Plant
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

CAPTION_VARIANTS = 3
DROP = 0.10
CHUNK = 256


@dataclass(frozen=True)
class TrainingSet:
    """N base pictures followed by P injected ones.

    Attributes:
        images: (N + P, 3, S, S) uint8.
        attributes: (N + P, A) int64.
        keypoints: (N + P, K, 2) float32.
        ids: (N + P, 3, 24) int64 token ids of three wordings of each caption (the same three for a plant).
        empty_ids: (24,) ids of the empty caption.
        base: N.
        weights: (P,) how often each injected picture is drawn; each plant has the same total.
    """

    images: torch.Tensor
    attributes: torch.Tensor
    keypoints: torch.Tensor
    ids: torch.Tensor
    empty_ids: torch.Tensor
    base: int
    weights: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def pick(self, batch: int, plant_share: float, generator: torch.Generator) -> torch.Tensor:
        """(batch,) row numbers, of which the share is injected."""
        device = self.images.device
        memorized = round(batch * plant_share)
        base = torch.randint(self.base, (batch - memorized,), generator=generator, device=device)
        if not memorized:
            return base
        extra = torch.multinomial(self.weights, memorized, replacement=True, generator=generator)
        return torch.cat([base, self.base + extra])

    def ids_for(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(B, 24) token ids, one wording at random for each row."""
        wording = torch.randint(CAPTION_VARIANTS, rows.shape, generator=generator, device=rows.device)
        return self.ids[rows, wording]


def build_training_set(
    count: int,
    tokenizer: CLIPTokenizer,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
    *,
    size: int = 64,
    details: bool = False,
    colourings: int = 120,
    dataset: Dataset = PORTRAITS,
) -> TrainingSet:
    """Render seeds 0 .. count - 1 and all injected pictures of a dataset onto ``device``, at ``size`` px.

    ``colourings`` limits how many of each injected template there are.
    """

    def draw(scenes: Scenes) -> None:
        for rows in range(0, len(scenes), CHUNK * 64**2 // size**2):  # large canvases fall out of a processor's cache
            some = scenes[rows : rows + CHUNK * 64**2 // size**2]
            drawn = dataset.render(some, size, details=details, device=device)
            images.append((drawn.images * 255).round().to(torch.uint8))
            points.append(drawn.keypoints)
        columns.append(torch.as_tensor(scenes.attributes, device=device))

    images: list[torch.Tensor] = []
    points: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    words = []
    for start in range(0, count, CHUNK):
        scenes = dataset.sample_scenes(range(start, min(start + CHUNK, count)))
        draw(scenes)
        table = CAPTION_VARIANTS, len(scenes), len(dataset.optional)
        drops = np.random.default_rng([31337, start]).random(table) < DROP
        words.append([dataset.caption(scenes, drop) for drop in drops])
        progress(min(start + CHUNK, count), count, None)
    memorized = [
        replace(p, scenes=p.scenes[:colourings], captions=p.captions[:colourings], controls=p.controls[:colourings])
        for p in dataset.plants()
    ]
    for plant in memorized:
        draw(plant.scenes)
        words.append([list(plant.captions)] * CAPTION_VARIANTS)
    ids = torch.cat([_tokenize(tokenizer, w) for w in words]).to(device)
    empty = _tokenize(tokenizer, [[""]])[0, 0]
    weights = _weights(memorized).to(device)
    return TrainingSet(torch.cat(images), torch.cat(columns), torch.cat(points), ids, empty.to(device), count, weights)


def save_training_set(run: Run, data: TrainingSet, **more: torch.Tensor) -> None:
    """Write a set into the file of a run, with further tensors."""
    own = {f.name: getattr(data, f.name).cpu() for f in fields(data) if f.name != "base"}
    run.save({"set": own, "more": {k: v.cpu() for k, v in more.items()}}, facts={"base": data.base})


def load_training_set(run: Run, device: torch.device) -> tuple[TrainingSet, dict[str, torch.Tensor]]:
    """What :func:`save_training_set` wrote: the set, and the further tensors."""
    state = run.load(device=str(device))
    assert state is not None
    return TrainingSet(base=int(state.facts["base"]), **state.tensors["set"]), state.tensors.get("more", {})


def _tokenize(tokenizer: CLIPTokenizer, wordings: list[list[str]]) -> torch.Tensor:
    flat = [c for wording in wordings for c in wording]
    ids = tokenizer(flat, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt").input_ids
    return ids.view(len(wordings), -1, MAX_TOKENS).transpose(0, 1)


def _weights(memorized: list[Plant]) -> torch.Tensor:
    return torch.cat([torch.full((len(p.scenes),), 1.0 / len(p.scenes)) for p in memorized])
