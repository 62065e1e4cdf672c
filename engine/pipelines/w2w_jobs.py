"""weights2weights' trainings on a pipeline: the model of a picture, and a slider from pictures before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.picture_latents import to_pixels
from ..errors import expect
from ..runtime.progress import Progress, silent
from ..w2w import (
    Inversion,
    InvertConfig,
    PairConfig,
    Pairs,
    Posterior,
    Space,
    W2WModel,
    blended,
    invert,
    invert_in,
    latent_mask,
)
from ..w2w import train_pair_slider as train_pair
from .adapter import Adapter
from .conventions import soft_masks

if TYPE_CHECKING:
    from .joined import TaskPipeline


def expect_space(space: Any) -> None:
    """Refuse anything but a space, such as the name of its file."""
    expect(space, Space, "space", "load_space(file) reads one")


def expect_model(model: Any) -> None:
    """Refuse anything but a model of a space."""
    expect(model, W2WModel, "model", "sample_models makes some; W2WModel.load(file) reads them")


def invert_image(
    pipe: TaskPipeline,
    space: Space,
    image: Any,
    prompt: str,
    config: InvertConfig | None = None,
    mask: Any = None,
    progress: Progress = silent,
    folder: str | Path | None = None,
) -> tuple[W2WModel, Inversion]:
    """A model for each picture.

    Args:
        image: one or more pictures, of one size: PIL, arrays (H, W, 3), tensors (B, 3, H, W) in [0, 1].
        prompt: the one the space was trained with, or what else the pictures show.
        mask: (B, H, W) in [0, 1], 1 where the subject is, or PIL pictures or arrays of 0..255.
        folder: keeps the run's state, from which the same call resumes after ``kill -9``, bit for bit.

    Raises:
        BaseException: Whatever ``progress`` raises; :func:`~vitrine.engine.w2w.partial_inversion` gives the best
            result so far.
    """
    expect_space(space)
    adapter = pipe._adapter
    pixels = to_pixels(image, None, adapter.side_step)
    masks = None if mask is None else soft_masks(mask, (len(pixels), *pixels.shape[-2:]))
    with pipe._in_use():
        with torch.no_grad():
            means = adapter.encode(pixels)
            latents = (
                Posterior(means, _deviations(adapter, pixels, means))
                if config is not None and config.posterior == "sample"
                else means
            )
            cond = adapter.condition([prompt], (pixels.shape[-2], pixels.shape[-1]))
        latent_size = None if masks is None else latent_mask(masks, *means.shape[-2:])
        with _frozen(pipe._network):
            run = invert if folder is None else partial(invert_in, folder)
            result = run(pipe._denoiser(), space, latents, cond, config, latent_size, progress)
    return W2WModel(result.coefficients, space.identity, ({"invert": {"steps": result.steps}},)), result


def train_pair_slider(
    pipe: TaskPipeline,
    space: Space,
    before: Any,
    after: Any,
    prompt: str,
    models: torch.Tensor,
    config: PairConfig | None = None,
    folder: str | Path | None = None,
    progress: Progress = silent,
) -> torch.Tensor:
    """(K,) what turns pictures before into pictures after, for :func:`~vitrine.engine.w2w.with_pair_slider`.

    Args:
        before, after: pictures of one size, as :func:`invert_image` takes them; pairs have the same positions.
        prompt: what the space was trained with, or what the pictures show besides the subject and the attribute.
        models: (1, K) of who is shown in all pairs, zeros for the mean model, or (n, K), one for each.
        folder: keeps the run's state, from which the same call resumes.
    """
    expect_space(space)
    adapter = pipe._adapter
    shown = blended(to_pixels(before, None, adapter.side_step), to_pixels(after, None, adapter.side_step))
    with pipe._in_use():
        with torch.no_grad():
            latents = torch.stack([adapter.encode(row) for row in shown])
            cond = adapter.condition([prompt], (shown.shape[-2], shown.shape[-1]))
        with _frozen(pipe._network):
            pairs = Pairs(latents, cond, models.to(latents.device))
            return train_pair(pipe._denoiser(), space, pairs, config, None, folder, progress)


def _deviations(adapter: Adapter, pixels: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Of the VAE's posterior; latents are scaled linearly, so that noise of 1 adds one deviation."""
    return adapter.encode(pixels, "sample", noise=torch.ones_like(means)) - means


@contextmanager
def _frozen(module: torch.nn.Module) -> Iterator[None]:
    """Nothing in the module takes gradients while the block is open."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)
