"""Concept sliders (Gandikota et al. 2024), the baseline w2w edits are compared with: one LoRA for each attribute.

eps_slider(x, c) is pulled towards eps(x, c) + eta (eps(x, c+) - eps(x, c-)), all on the base model, so that the LoRA at
strength 1 does what the words of c+ do. All sliders are trained in one batch, as the LoRAs of a space are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.condition import Condition
from ...engine.config import Config
from ...engine.denoiser import Denoiser
from ...engine.progress import Progress, silent
from ...engine.w2w.batched_lora import PAPER_TARGETS, BatchedLora, initial_lora
from ...engine.w2w.manifest import Manifest


@dataclass(frozen=True)
class SliderConfig(Config):
    """Settings; ``eta`` is the guidance of the target, ``batch`` the rows of each slider in a step."""

    steps: int = 200
    batch: int = 4
    lr: float = 5e-3
    eta: float = 2.0
    rank: int = 1
    alpha: float = 4.0
    targets: tuple[str, ...] = PAPER_TARGETS
    seed: int = 0


def train_sliders(
    model: Denoiser, latents: torch.Tensor, plain: Condition, positive: Sequence[Condition],
    config: SliderConfig | None = None, progress: Progress = silent,
) -> tuple[torch.Tensor, Manifest]:  # fmt: skip
    """(S, D) weights of S sliders, and their manifest.

    Args:
        latents: (n, C, H, W) scaled latents to noise.
        plain: n rows, the prompts of the latents' pictures; c and c- at once.
        positive: for each slider n rows, the same prompts with its word; c+.
    """
    config = config or SliderConfig()
    start = initial_lora(model.backbone, config.targets, config.rank, config.alpha, config.seed)
    manifest = Manifest.of(start)
    weights = manifest.flatten(start).expand(len(positive), -1).clone().requires_grad_()
    adam, random = torch.optim.AdamW([weights], config.lr), torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        rows = torch.randint(len(latents), (config.batch,), generator=random)
        t = torch.randint(1000, (config.batch,), generator=random)
        x_t = model.network_input(latents[rows], torch.randn(latents[rows].shape, generator=random), t)
        with torch.no_grad():
            away = model.predict(x_t, t, plain.take(rows)).eps
            towards = [model.predict(x_t, t, c.take(rows)).eps for c in positive]
            # Gandikota et al. 2024, Eq. 7
            target = torch.cat([away + config.eta * (p - away) for p in towards])
        many = (x_t.repeat(len(positive), 1, 1, 1), t.repeat(len(positive)), plain.take(rows).repeat(len(positive)))
        with BatchedLora(model.backbone, manifest, weights):
            error = (model.predict(*many).eps - target).square()
        error.flatten(1).mean(1).view(len(positive), -1).mean(1).sum().backward()
        torch.nn.utils.clip_grad_norm_([weights], len(positive) ** 0.5)
        adam.step()
        adam.zero_grad()
        progress(step + 1, config.steps, None)
    return weights.detach(), manifest
