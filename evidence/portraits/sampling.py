"""Sampling portraits: DDIM or the flow's Euler steps, with classifier-free guidance, one seed for each picture."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sample
from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.models import Portraits
from ...engine.runtime.progress import Progress, silent


def sample_latents(
    model: Portraits | FlowPortraits,
    prompts: list[str] | torch.Tensor,
    seeds: list[int],
    *,
    steps: int = 30,
    guidance: float = 3.0,
    progress: Progress = silent,
) -> torch.Tensor:
    """Latents (B, *model.latent_shape) for B prompts and B seeds. Guidance 1 makes one conditional pass a step.

    Prompts may be text states (B, T, 64), which are guided against as many tokens of the empty prompt.

    The steps are the scheduler's: DDIM (Song et al. 2021, Eq. 12) with eta = 0, or Euler's.
    """
    device = model.backbone.device
    text = model.encode(prompts) if isinstance(prompts, list) else prompts.to(device)
    null = model.condition(model.encode([""])[:, : text.shape[1]])
    denoiser = Denoiser.from_diffusers(model.backbone, model.scheduler)
    noise = seeded_noise(seeds, model.latent_shape).to(device)
    return sample(
        denoiser, noise, model.scheduler, steps, model.condition(text), null=null, guidance=guidance, progress=progress
    )


@torch.no_grad()
def decode(model: Portraits | FlowPortraits, latents: torch.Tensor) -> torch.Tensor:
    """(B, 3, S, S) float32 pictures in [0, 1]."""
    pixels = model.vae.decode(latents.to(model.vae.device) / model.vae.config.scaling_factor).sample
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


def sample_images(
    model: Portraits | FlowPortraits,
    prompts: list[str] | torch.Tensor,
    seeds: list[int],
    *,
    batch: int = 64,
    progress: Progress = silent,
    **settings: Any,
) -> torch.Tensor:
    """Any number of pictures (N, 3, S, S) in [0, 1], in batches; results do not depend on ``batch``."""
    images = []
    for start in range(0, len(prompts), batch):
        rows = slice(start, start + batch)
        images.append(decode(model, sample_latents(model, prompts[rows], seeds[rows], **settings)).cpu())
        progress(min(start + batch, len(prompts)), len(prompts), images[-1][:1])
    return torch.cat(images)
