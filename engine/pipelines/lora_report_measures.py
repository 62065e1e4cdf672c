"""What the LoRA report makes of samples: agreement and copies by prompt and strength, variety, drift, agreement with
the prompt. Pictures in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..emd.variety import mean_distance, small_pixels
from ..io.table_on_disk import RowFile
from ..jobs.digests import digest
from ..nemo.blocked_copies import share_interval
from ..nemo.check import Pictures
from ..nemo.nearest import LENGTH, Nearest, PictureIndex, distances, thumbnails
from ..w2w.loras.lora_prompts import ORDINARY, AskedPrompt

_USUAL = 32
"""Samples without the LoRA that say which distance is usual."""
Samples = Mapping[str, torch.Tensor]
"""Prompt -> (S, 3, h, w) in [0, 1]."""


class PromptJudge(Protocol):
    """A CLIP: unit vectors of pictures and of texts."""

    def pictures(self, images: torch.Tensor) -> torch.Tensor:
        """(B, D)."""

    def texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """(B, D)."""


@dataclass(frozen=True)
class PromptCopies:
    """Of one prompt at strength 1.

    Attributes:
        prompt, kind: see :class:`~vitrine.engine.w2w.loras.lora_prompts.AskedPrompt`.
        samples: how many.
        distance, bare: of two of its samples, the median pair's, with the LoRA and without it (NaN: not sampled).
        repeats: samples that are copies of another sample of the prompt: nearer than a third of the usual distance.
        copies: samples that are copies of a training picture; None without pictures.
        nearest: which training picture the shown sample is nearest to; None without pictures.
        ratio: its distance, as a share of the usual one; without pictures that to the nearest other sample.
        area: share of the picture where it is below a third.
        shown: (3, h, w) the sample that is nearest.
        where: (64, 64) the ratio around each pixel of it.
    """

    prompt: str
    kind: str
    samples: int
    distance: float
    bare: float
    repeats: int
    copies: int | None
    nearest: int | None
    ratio: float
    area: float
    shown: torch.Tensor = field(repr=False)
    where: torch.Tensor = field(repr=False)

    @property
    def lost(self) -> float:
        """Share of the distance between its samples that the LoRA takes: 1 where every seed gives one picture."""
        return max(1 - self.distance / max(self.bare, 1e-6), -1.0)

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON."""
        table: dict[str, Any] = {
            "prompt": self.prompt, "kind": self.kind, "samples": self.samples, "distance": round(self.distance, 4),
            "distance_without": round(self.bare, 4), "lost": round(self.lost, 4), "repeats": self.repeats,
            "ratio": round(self.ratio, 4), "area": round(self.area, 4),
        }  # fmt: skip
        if self.copies is not None and self.nearest is not None:
            interval = share_interval(self.copies, self.samples)
            table |= {"copies": self.copies, "copies_95": list(interval), "nearest": names[self.nearest]}
        return table


class CopyReader:
    """Compares samples with the training pictures, or with each other where there are none.

    Args:
        bare: samples without the LoRA.
        own: its own prompts: of these say which distance is usual.
        pictures: the training pictures; they are read once, and their thumbnails kept in the folder.
    """

    def __init__(self, bare: Samples, own: Sequence[str], pictures: Pictures, folder: Path) -> None:
        self.bare = bare
        # as in the copy check, the model without the LoRA says on the same prompts which distance is usual
        known = [bare[prompt] for prompt in own if prompt in bare] or list(bare.values())
        usual = torch.cat(known)[:_USUAL]
        self.usual = thumbnails(usual)
        self._table: RowFile | None = None
        if pictures.names and pictures.read is not None:
            self._table = RowFile(
                folder / f"pictures-{digest(pictures)[:16]}", (len(pictures.names), LENGTH), torch.float16
            )
            for i in (~self._table.done).nonzero()[:, 0].tolist():
                self._table.write(i, thumbnails(cropped(pictures.read(i)[None], usual[0])).flatten(1))
        self._among = PictureIndex(None, self.usual)
        self._index = self._among if self._table is None else PictureIndex(self._table, self.usual)

    def __enter__(self) -> CopyReader:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._table is not None:
            self._table.close()

    @property
    def by_pictures(self) -> bool:
        """Whether there are training pictures to compare with."""
        return self._table is not None

    def near(self, samples: torch.Tensor) -> Nearest:
        """Of one prompt's samples."""
        return self._index.nearest(thumbnails(samples))

    def of_prompt(self, asked: AskedPrompt, full: torch.Tensor) -> PromptCopies:
        """One prompt, from its samples with the LoRA."""
        near, others = self.near(full), self._among.nearest(thumbnails(full))
        closest = int(near.ratios.argmin())
        bare = between(self.bare[asked.text]) if asked.text in self.bare else float("nan")
        return PromptCopies(
            asked.text, asked.kind, len(full), between(full), bare, int(others.copied.sum()),
            int(near.copied.sum()) if self.by_pictures else None,
            int(near.numbers[closest]) if self.by_pictures else None,
            float(near.ratios[closest]), float(near.areas[closest]), full[closest], near.maps[closest],
        )  # fmt: skip


def between(samples: torch.Tensor) -> float:
    """Distance of two samples (S, 3, h, w) of one prompt, see :func:`distances`: the median pair's."""
    small = thumbnails(samples)
    first, second = torch.triu_indices(len(small), len(small), 1)
    return float(distances(small, small)[first, second].quantile(0.5))


def cropped(pictures: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pictures (B, 3, H, W) cropped around their middle to the proportions of another, as trainers do."""
    height, width = pictures.shape[-2:]
    scale = min(height / like.shape[-2], width / like.shape[-1])
    tall, wide = (min(side, round(scale * other)) for side, other in zip((height, width), like.shape[-2:], strict=True))
    top, left = (height - tall) // 2, (width - wide) // 2
    return pictures[..., top : top + tall, left : left + wide]


@dataclass(frozen=True)
class Cost:
    """What the LoRA costs.

    Attributes:
        variety: (without, with) mean distance between two samples of one prompt, over its own prompts.
        ordinary: the same over ordinary prompts.
        drift: distance of samples of ordinary prompts to those without the LoRA at equal seeds, as a share of that
            between samples of different prompts.
        prompt: (without, with) cosine of pictures and their prompts by CLIP; None without one.
    """

    variety: tuple[float, float] | None
    ordinary: tuple[float, float] | None
    drift: float | None
    prompt: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        pairs = {"variety": self.variety, "variety_ordinary": self.ordinary, "prompt_agreement": self.prompt}
        table: dict[str, Any] = {
            name: None if pair is None else {"without": round(pair[0], 4), "with": round(pair[1], 4)}
            for name, pair in pairs.items()
        }
        return table | {"drift": None if self.drift is None else round(self.drift, 4)}


def cost_of(asked: Sequence[AskedPrompt], bare: Samples, full: Samples, judge: PromptJudge | None = None) -> Cost:
    """From samples of the same prompts and seeds without and with the LoRA."""
    both = [p for p in asked if p.text in bare and p.text in full]
    own, ordinary = ([p.text for p in both if (p.kind == ORDINARY) == plain] for plain in (False, True))
    drift = None
    if len(ordinary) > 1:
        moved = torch.cat([_paired(bare[p], full[p]) for p in ordinary])
        first = thumbnails(torch.cat([bare[p][:1] for p in ordinary]))
        rows, columns = torch.triu_indices(len(first), len(first), 1)
        drift = float(moved.median() / distances(first, first)[rows, columns].median().clamp_min(1e-6))
    return Cost(
        _variety(own, bare, full), _variety(ordinary, bare, full), drift, _prompt(own + ordinary, bare, full, judge)
    )


def _variety(prompts: Sequence[str], bare: Samples, full: Samples) -> tuple[float, float] | None:
    if not prompts:
        return None
    means = [sum(mean_distance(small_pixels(samples[p])) for p in prompts) / len(prompts) for samples in (bare, full)]
    return means[0], means[1]


def _paired(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(S,) distance of samples of equal seeds, as :func:`~vitrine.engine.nemo.nearest.distances`."""
    return (thumbnails(a) - thumbnails(b)).flatten(1).square().mean(1).sqrt()


def _prompt(
    prompts: Sequence[str], bare: Samples, full: Samples, judge: PromptJudge | None
) -> tuple[float, float] | None:
    if judge is None or not prompts:
        return None
    texts, means = judge.texts(prompts), []
    for samples in (bare, full):
        cosines = [(judge.pictures(samples[p]) @ text).mean() for p, text in zip(prompts, texts, strict=True)]
        means.append(float(torch.stack(cosines).mean()))
    return means[0], means[1]
