"""Concept sliders (Gandikota et al. 2024), the baseline w2w edits are compared with: one LoRA for each attribute.

eps_slider(x, c) is pulled towards eps(x, c) + eta (eps(x, c+) - eps(x, c-)), all on the base model, so that the LoRA at
strength 1 does what the words of c+ do; networks that predict v or a velocity are pulled in those terms. All sliders
are trained in one batch, like the LoRAs of a space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.guidance import guide
from ...engine.network.condition import Condition
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.config import Config
from ...engine.w2w.space.manifest import Manifest
from ...engine.w2w.train.batched_lora import PAPER_TARGETS, BatchedLora, initial_lora


@dataclass(frozen=True)
class SliderConfig(Config):
    """Settings.

    Attributes:
        steps, lr: of AdamW.
        batch: rows of each slider in a step.
        eta: guidance of the target.
        rank, alpha, targets, seed: of the LoRAs, as in ``LoraTrainConfig``.
    """

    steps: int = 200
    batch: int = 4
    lr: float = 5e-3
    eta: float = 2.0
    rank: int = 1
    alpha: float = 4.0
    targets: tuple[str, ...] = PAPER_TARGETS
    seed: int = 0


def train_sliders(
    model: Denoiser,
    latents: torch.Tensor,
    plain: Condition,
    positive: Sequence[Condition],
    config: SliderConfig | None = None,
    progress: Progress = silent,
) -> tuple[torch.Tensor, Manifest]:
    """(S, D) weights of S sliders, and their manifest.

    Args:
        latents: (n, C, H, W) scaled latents to noise.
        plain: n rows, the prompts of the latents' pictures; both c and c-.
        positive: for each slider n rows, the same prompts with its word; c+.
    """
    config = config or SliderConfig()
    start = initial_lora(model.backbone, config.targets, config.rank, config.alpha, config.seed)
    manifest = Manifest.of(start)
    weights = manifest.flatten(start).expand(len(positive), -1).clone().requires_grad_()
    optimizer, random = torch.optim.AdamW([weights], config.lr), torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        picture = torch.randint(len(latents), (config.batch,), generator=random)
        t = torch.randint(1000, (config.batch,), generator=random)
        x_t = model.network_input(latents[picture], torch.randn(latents[picture].shape, generator=random), t)
        with torch.no_grad():
            base = model.predict(x_t, t, plain.take(picture))
            worded = [model.predict(x_t, t, c.take(picture)) for c in positive]
            # Gandikota et al. 2024, Eq. 7; of eps and of the clean latent alike, which is linear in it
            eps = torch.cat([guide(base.eps, each.eps, config.eta) for each in worded])
            x0 = torch.cat([guide(base.x0, each.x0, config.eta) for each in worded])
        count = len(positive)
        batch = (x_t.repeat(count, 1, 1, 1), t.repeat(count), plain.take(picture).repeat(count))
        with BatchedLora(model.backbone, manifest, weights):
            error = model.error(model.forward(*batch), batch[0], x0, eps, batch[1]).square()
        error.flatten(1).mean(1).view(count, -1).mean(1).sum().backward()
        torch.nn.utils.clip_grad_norm_([weights], count**0.5)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, config.steps, None)
    return weights.detach(), manifest
