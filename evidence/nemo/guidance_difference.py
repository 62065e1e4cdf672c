"""How a prompt pulls at the prediction: the size, the direction and the bend of the guidance difference.

Three published scores of memorization, rivals of NeMo's, each from the same unit noises x_T:
Wen et al. (ICLR 2024), the norm; "Memorization anisotropy" (ICLR 2026, arXiv 2601.20642), norm and direction;
Jeon et al. (ICML 2025, arXiv 2412.04140), sharpness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.nemo.noise_similarity import ddim_timestep
from ...engine.network.condition import Condition

SEEDS = range(51, 55)
"""Of the noises over which scores are averaged; one and four noises are published."""
GRID = 50
"""Steps of the DDIM grid; the norm is read at its first timestep, the direction at its third from the end."""
WEIGHTS = (1.0, 2.0)
"""Of the norm and the cosine in their sum, as published for SD1.4."""


@dataclass(frozen=True)
class Pull:
    """Scores of one prompt, means over noises; the larger, the more it looks memorized.

    Attributes:
        norm: ||eps_c - eps_u|| at the first timestep, over all entries of the latent.
        cosine: -1..1, of eps_c - eps_u with eps_u near the end of the grid: by channel, then the mean over positions.
        anisotropy: their weighted sum.
        sharpness: ||J_c d - J_u d|| with d the difference of the two scores.
    """

    norm: float
    cosine: float
    anisotropy: float
    sharpness: float


@torch.no_grad()
def pull(
    denoiser: Denoiser,
    cond: Condition,
    empty: Condition,
    shape: tuple[int, int, int],
    seeds: Sequence[int] = SEEDS,
    stride: float = 0.01,
) -> Pull:
    """The scores of one prompt.

    Args:
        cond, empty: one row each: the prompt, and what guidance starts from.
        shape: (C, h, w) of the latents.
        stride: of the finite difference of the sharpness, as a share of the noise's norm.
    """
    x = seeded_noise(seeds, shape).to(cond.device)
    rows = torch.zeros(len(x), dtype=torch.long)
    both = Condition.batch([cond.take(rows), empty.take(rows)])
    total = denoiser.schedule.steps
    first, late = (ddim_timestep(GRID, i, total) for i in (0, GRID - 3))

    def difference(noise: torch.Tensor, t: float) -> tuple[torch.Tensor, torch.Tensor]:
        full, null = denoiser.predict(torch.cat([noise, noise]), t, both).eps.chunk(2)
        return full - null, null

    d, _ = difference(x, first)
    norms = d.flatten(1).norm(dim=1)
    # arXiv 2601.20642: both forwards take the same pure noise, also at the late timestep
    late_d, null = difference(x, late)
    # where the difference vanishes it has no direction, and counts as 0
    cosine = torch.cosine_similarity(null, late_d, dim=1).nan_to_num().flatten(1).mean(1)
    sums = WEIGHTS[0] * norms + WEIGHTS[1] * cosine
    length = stride * x.flatten(1).norm(dim=1)
    unit = d / norms.clamp_min(1e-12).view(-1, 1, 1, 1)
    bent, _ = difference(x + unit * length.view(-1, 1, 1, 1), first)
    # Jeon et al. 2025: ||J_c d - J_u d||; J of the score -eps / sigma, and d of the two scores, so twice by sigma
    sigma = float(denoiser.schedule.scales(first)[1])
    sharpness = float(((bent - d).flatten(1).norm(dim=1) / length * norms).mean()) / sigma**2
    norm, direction, weighted = torch.stack([norms.mean(), cosine.mean(), sums.mean()]).tolist()
    return Pull(norm, direction, weighted, sharpness)
