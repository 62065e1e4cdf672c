"""Prompts of NEMO's jobs: encoded some at a time, and what they are scored at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.picture_latents import to_pixels
from ..errors import refuse
from ..jobs.run import Run
from ..network.condition import Condition
from ..runtime.processes import Workers
from .components import components_of

if TYPE_CHECKING:
    from .joined import TaskPipeline

UNUSED = ("vae", "image_encoder", "safety_checker", "feature_extractor")
"""Components that values and scores do not depend on."""
TOGETHER = 64
"""Most prompts that are encoded at once."""


def conditions(pipe: TaskPipeline, prompts: str | Iterable[str]) -> list[Condition]:
    """One condition of one row for each prompt, encoded as the pipeline does."""
    with pipe._in_use():
        return [row for batch in encoded_batches(pipe, texts_of(prompts)) for row in one_each(batch)]


def encoded_batches(pipe: TaskPipeline, prompts: list[str], size: int = TOGETHER) -> Iterator[Condition]:
    """The prompts ``size`` at a time; encoded when their turn comes, so that no list is too long."""
    for start in range(0, len(prompts), size):
        with torch.no_grad():
            yield pipe._adapter.condition(prompts[start : start + size], predicted_pixels(pipe))


def job_run(
    pipe: TaskPipeline,
    job: str,
    prompts: list[str],
    settings: Mapping[str, object],
    state: str | Path | None,
    workers: Workers,
) -> Run:
    """A job on a list of prompts, of which this process has a share and a file."""
    part = {"prompts": prompts, "processes": [workers.index, workers.count], "size": predicted_pixels(pipe)}
    inputs = {**components_of(pipe, UNUSED), **part, **settings}
    return Run(None if state is None else workers.own_file(state), f"NEMO {job}", inputs)


def predicted_pixels(pipe: TaskPipeline) -> tuple[int, int]:
    """(height, width) of what scores and searches predict."""
    return getattr(pipe, "predicted_size", None) or pipe._adapter.usual_size()


def latent_shape(pipe: TaskPipeline) -> tuple[int, int, int]:
    """(C, h, w) of the latents that are scored and searched."""
    adapter = pipe._adapter
    channels = adapter.network.config.in_channels if adapter.is_unet else adapter.channels
    if channels != adapter.channels:
        remedy = "use the text-to-image model that it was made from"
        raise refuse("UNet", f"{channels} input channels", f"{adapter.channels}, those of its latents", remedy)
    height, width = (side // adapter.factor for side in predicted_pixels(pipe))
    return channels, height, width


def latents_of(pipe: TaskPipeline, picture: Any) -> torch.Tensor:
    """(B, C, h, w) of pictures in any usual form, in the model's own scale."""
    with torch.no_grad():
        return pipe._adapter.encode(to_pixels(picture, None, pipe._adapter.factor))


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
