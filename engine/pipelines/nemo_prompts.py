"""Prompts of NEMO's jobs: encoded some at a time, and what they are scored at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from ..activations.picture_latents import to_pixels
from ..errors import refuse
from ..jobs.run import Run
from ..network.condition import Condition
from ..runtime.processes import Workers
from ..settings.sizes import check_sides
from .components import components_of
from .joined import TaskPipeline

UNUSED = ("vae", "image_encoder", "safety_checker", "feature_extractor")
"""Components that values and scores do not depend on."""
TOGETHER = 64
"""Most prompts that are encoded at once."""


class PromptJobs(TaskPipeline):
    """What scoring, searching and sampling for NEMO share.

    Attributes:
        predicted_size: (height, width) in pixels of what scores and searches predict; None is the pipeline's own.
    """

    _choices = ("size",)
    predicted_size: tuple[int, int] | None = None

    @classmethod
    def from_pipe(cls, pipeline: Any, *, size: tuple[int, int] | None = None, **kwargs: Any) -> Self:
        """As :meth:`TaskPipeline.from_pipe`, with a size.

        Args:
            size: (height, width) in pixels of what scores and searches predict; by default the pipeline's own. What a
                call samples is as large as the call says, and blocked at any size.
        """
        check_sides("size", *(size or ()))
        made = super().from_pipe(pipeline, **kwargs)
        if size is not None and any(side < 1 or side % made._adapter.factor for side in size):
            accepted = f"(height, width), multiples of {made._adapter.factor}"
            raise refuse("size", size, accepted, "those of the pictures that you sample")
        made.predicted_size = size
        return made

    def conditions(self, prompts: str | Iterable[str]) -> list[Condition]:
        """One condition of one row for each prompt, encoded as the pipeline does."""
        with self._in_use():
            return [row for batch in self._encoded(texts_of(prompts)) for row in one_each(batch)]

    def _encoded(self, prompts: list[str], size: int = TOGETHER) -> Iterator[Condition]:
        """The prompts ``size`` at a time; encoded when their turn comes, so that no list is too long."""
        for start in range(0, len(prompts), size):
            with torch.no_grad():
                yield self._adapter.condition(prompts[start : start + size], self._pixels())

    def _run(
        self, job: str, prompts: list[str], settings: Mapping[str, object], state: str | Path | None, workers: Workers
    ) -> Run:
        """A job on a list of prompts, of which this process has a share and a file."""
        part = {"prompts": prompts, "processes": [workers.index, workers.count]}
        size = {"size": self.predicted_size}
        inputs = {**components_of(self, UNUSED), **part, **size, **settings}
        return Run(None if state is None else workers.own_file(state), f"NEMO {job}", inputs)

    def _pixels(self) -> tuple[int, int]:
        """(height, width) of what scores and searches predict."""
        return self.predicted_size or self._adapter.usual_size()

    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of the latents that are scored and searched."""
        adapter = self._adapter
        channels = adapter.network.config.in_channels if adapter.is_unet else adapter.channels
        if channels != adapter.channels:
            remedy = "use the text-to-image model that it was made from"
            raise refuse("UNet", f"{channels} input channels", f"{adapter.channels}, those of its latents", remedy)
        height, width = (side // adapter.factor for side in self._pixels())
        return channels, height, width

    def latents(self, picture: Any) -> torch.Tensor:
        """(B, C, h, w) of pictures in any usual form, in the model's own scale."""
        with torch.no_grad():
            return self._adapter.encode(to_pixels(picture, None, self._adapter.factor))


def texts_of(prompts: str | Iterable[str]) -> list[str]:
    """One prompt, or several; a text is one prompt, not its letters."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise refuse("prompts", texts, "one prompt at least", "pass a text or a list of texts")
    return texts


def one_each(batch: Condition) -> list[Condition]:
    """The conditions of a batch, one batch row each."""
    return [batch.take(torch.tensor([i])) for i in range(batch.count)]


def text_of(cond: Condition) -> torch.Tensor:
    """The text states (B, T, C) of an encoded prompt."""
    assert cond.text is not None
    return cond.text
