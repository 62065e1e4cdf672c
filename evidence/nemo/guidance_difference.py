"""Rival scores of memorization, from the difference that guidance makes: its size, its direction and its bend.

Four or six network rows a noise, each from the same unit noise x_T: Wen et al. (ICLR 2024), the norm; "Memorization
anisotropy" (ICLR 2026, arXiv 2601.20642), norm and direction; Jeon et al. (ICML 2025, arXiv 2412.04140), sharpness.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.nemo.find import score_prompts
from ...engine.nemo.noise_similarity import Probe, ddim_timestep
from ...engine.network.condition import Condition

STEPS = 50
"""Of the DDIM grid: the norm is read at its first timestep, the direction at its third from the end."""
SD14_WEIGHTS = (1.0, 2.0)
"""Published weights of the norm and the cosine in their sum."""


@torch.no_grad()
def guidance_difference(
    denoiser: Denoiser, cond: Condition, empty: Condition, shape: tuple[int, int, int],
    seeds: Sequence[int] = range(51, 55), weights: tuple[float, float] = SD14_WEIGHTS, stride: float = 0.01,
) -> dict[str, float]:  # fmt: skip
    """``norm``, ``cosine``, ``anisotropy`` and ``sharpness``: means over noises, the larger the more it looks memorized.

    The norm is ||eps_c - eps_u||, the cosine that of eps_c - eps_u with eps_u (by channel, then the mean over
    positions), the anisotropy their weighted sum, and sharpness ||J_c d - J_u d|| with d the difference of the scores.

    Args:
        cond, empty: one row each: the prompt, and what guidance starts from.
        shape: (C, h, w) of the latents.
        stride: of the finite difference, as a fraction of the noise's norm.
    """
    x = seeded_noise(seeds, shape).to(cond.device)
    rows = torch.zeros(len(x), dtype=torch.long)
    both = Condition.batch([cond.take(rows), empty.take(rows)])
    first, late = (ddim_timestep(STEPS, i, denoiser.schedule.steps) for i in (0, STEPS - 3))

    def difference(noise: torch.Tensor, t: float) -> tuple[torch.Tensor, torch.Tensor]:
        full, null = denoiser.predict(torch.cat([noise, noise]), t, both).eps.chunk(2)
        return full - null, null

    d, _ = difference(x, first)
    norms = d.flatten(1).norm(dim=1)
    # arXiv 2601.20642: both forwards take the same pure noise, also at the late timestep
    late_d, null = difference(x, late)
    # where the difference vanishes it has no direction, and counts as 0
    cosine = torch.cosine_similarity(null, late_d, dim=1).nan_to_num().flatten(1).mean(1)
    length = stride * x.flatten(1).norm(dim=1)
    unit = d / norms.clamp_min(1e-12).view(-1, 1, 1, 1)
    bent, _ = difference(x + unit * length.view(-1, 1, 1, 1), first)
    # Jeon et al. 2025: ||J_c d - J_u d||; J of the score -eps / sigma, and d of the two scores, so twice by sigma
    sigma = float(denoiser.schedule.scales(first)[1])
    sharpness = ((bent - d).flatten(1).norm(dim=1) / length * norms).mean() / sigma**2
    sums = weights[0] * norms + weights[1] * cosine
    names = ("norm", "cosine", "anisotropy", "sharpness")
    return dict(zip(names, torch.stack([norms.mean(), cosine.mean(), sums.mean(), sharpness]).tolist(), strict=True))


def prompt_scores(probe: Probe, cond: Condition, empty: Condition, shape: tuple[int, int, int]) -> dict[str, float]:
    """NeMo's score, ``nemo``, and those of the guidance difference, by name."""
    ((score,), _) = score_prompts(probe, [cond], shape, None)
    return {"nemo": score.value} | guidance_difference(probe.denoiser, cond, empty, shape)
