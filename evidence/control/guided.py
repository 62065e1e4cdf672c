"""Samples of the portraits transformer under Eq. 2 (Berrada et al. 2024)."""

from __future__ import annotations

import torch

from ...engine.control import GuidanceConfig, Injection
from ...engine.control.size_guidance import control_guidance
from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sampling_loop
from ...engine.network.condition import Condition
from ..portraits.sampling import decode
from .controlled_transformer import NEUTRAL, SIDE, STEPS, ControlledTransformer

BATCH = 32


@torch.no_grad()
def draw_guided(
    model: ControlledTransformer, prompts: list[str], seeds: list[int], guidance: GuidanceConfig, steps: int = STEPS
) -> torch.Tensor:
    """Samples images (N, 3, 64, 64) in [0, 1] at the training size."""
    values = model.embedder.spec.rows(NEUTRAL | {"height": float(SIDE), "width": float(SIDE)})
    images = []
    for start in range(0, len(prompts), BATCH):
        rows = slice(start, start + BATCH)
        noise = seeded_noise(seeds[rows], (4, SIDE // 4, SIDE // 4))
        images.append(decode(model.portraits, _latents(model, prompts[rows], noise, values, guidance, steps)))
    return torch.cat(images)


def _latents(
    model: ControlledTransformer,
    prompts: list[str],
    noise: torch.Tensor,
    values: torch.Tensor,
    guidance: GuidanceConfig,
    steps: int,
) -> torch.Tensor:
    count, scheduler = len(prompts), model.scheduler
    text, empty = (Condition(model.portraits.encode(t)) for t in (prompts, [""] * count))
    denoiser = Denoiser.from_diffusers(model.transformer, scheduler)
    scheduler.set_timesteps(steps)
    injections = {
        control: Injection(
            model.transformer, model.embedder, values.expand(count, -1), model.gamma, torch.full((count,), not control)
        )
        for control in (True, False)
    }

    def predict(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        def evaluate(control: bool, semantics: bool) -> torch.Tensor:
            with injections[control]:
                return denoiser.forward(scheduler.scale_model_input(x, t), float(t), text if semantics else empty)

        return control_guidance(evaluate, guidance).prediction

    return sampling_loop(predict, noise * scheduler.init_noise_sigma, scheduler)
