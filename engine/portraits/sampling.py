"""Sampling portraits: DDIM with classifier-free guidance, one seed for each picture."""

from __future__ import annotations

from typing import Any

import torch

from ..progress import Progress, silent
from .models import Portraits


def seeded_noise(seeds: list[int], shape: tuple[int, ...] = (4, 16, 16)) -> torch.Tensor:
    """(B, *shape) float32 CPU noise; row i depends on ``seeds[i]`` only."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])


@torch.no_grad()
def sample_latents(
    model: Portraits,
    prompts: list[str] | torch.Tensor,
    seeds: list[int],
    *,
    steps: int = 30,
    guidance: float = 3.0,
    progress: Progress = silent,
) -> torch.Tensor:
    """(B, 4, 16, 16) latents for B prompts and B seeds. Guidance 1 makes one conditional pass a step.

    Prompts may be text states (B, T, 64), which are guided against as many tokens of the empty prompt.

    Guidance as in Ho & Salimans 2022, eps = eps_u + g (eps_c - eps_u); DDIM (Song et al. 2021, Eq. 12, eta = 0).
    """
    device = model.unet.device
    guided = guidance != 1.0
    text = model.encode(prompts) if isinstance(prompts, list) else prompts.to(device)
    if guided:
        empty = model.encode([""])[:, : text.shape[1]]
        text = torch.cat([text, empty.expand_as(text)])
    x = seeded_noise(seeds).to(device)
    model.scheduler.set_timesteps(steps)
    for i, t in enumerate(model.scheduler.timesteps):
        eps = model.unet(torch.cat([x, x]) if guided else x, t.to(device), text).sample.float()
        if guided:
            cond, uncond = eps.chunk(2)
            eps = uncond + guidance * (cond - uncond)
        x = model.scheduler.step(eps, t, x).prev_sample
        progress(i + 1, steps, None)
    return x


@torch.no_grad()
def decode(model: Portraits, latents: torch.Tensor) -> torch.Tensor:
    """(B, 3, 64, 64) float32 pictures in [0, 1]."""
    pixels = model.vae.decode(latents.to(model.vae.device) / model.vae.config.scaling_factor).sample
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


def sample_images(
    model: Portraits,
    prompts: list[str] | torch.Tensor,
    seeds: list[int],
    *,
    batch: int = 64,
    progress: Progress = silent,
    **settings: Any,
) -> torch.Tensor:
    """Any number of pictures (N, 3, 64, 64) in [0, 1], in batches; results do not depend on ``batch``."""
    images = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        images.append(decode(model, sample_latents(model, prompts[part], seeds[part], **settings)).cpu())
        progress(min(start + batch, len(prompts)), len(prompts), images[-1][:1])
    return torch.cat(images)
