"""How a prompt pulls at the prediction: the size, the direction and the bend of the guidance difference.

Three scores of memorization from four or six network rows a noise, each from the same unit noise x_T:
Wen et al. (ICLR 2024), the norm; "Memorization anisotropy" (ICLR 2026, arXiv 2601.20642), norm and direction;
Jeon et al. (ICML 2025, arXiv 2412.04140), sharpness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import seeded_noise
from ..errors import refuse
from ..network.condition import Condition
from ..settings.config import Config
from .find import score_prompts
from .noise_similarity import Probe, ddim_timestep


@dataclass(frozen=True)
class PullConfig(Config):
    """How a prompt's pull is measured.

    Attributes:
        noises: over which the scores are averaged; 1 and 4 are published.
        seed: of the first of them; the others follow.
        steps: of the DDIM grid; the norm is read at its first timestep, the direction at its third from the end.
        weights: of the norm and the cosine in their sum: (1, 2) for SD1.4, (1, 0.1) for SD2 (published).
        sharpness: whether to spend two further rows a noise on it.
        stride: of its finite difference, as a share of the noise's norm.
    """

    noises: int = 4
    seed: int = 51
    steps: int = 50
    weights: tuple[float, float] = (1.0, 2.0)
    sharpness: bool = True
    stride: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights))
        if self.noises < 1 or self.steps < 3 or len(self.weights) != 2 or not 0 < self.stride < 1:
            shown = (self.noises, self.steps, self.weights, self.stride)
            accepted = "noises >= 1, steps >= 3, two weights, stride in (0, 1)"
            raise refuse("noises, steps, weights, stride", shown, accepted, "use 4, 50, (1, 2) and 0.01")


PULL = PullConfig()


@dataclass(frozen=True)
class Pull:
    """Scores of one prompt, means over noises; the larger, the more it looks memorized.

    Attributes:
        norm: ||eps_c - eps_u|| at the first timestep, over all entries of the latent.
        cosine: -1..1, of eps_c - eps_u with eps_u near the end of the grid: by channel, then the mean over positions.
        anisotropy: their weighted sum.
        sharpness: ||J_c d - J_u d|| with d the difference of the two scores; None where it was left out.
    """

    norm: float
    cosine: float
    anisotropy: float
    sharpness: float | None = None


@torch.no_grad()
def pull(
    denoiser: Denoiser, cond: Condition, empty: Condition, shape: tuple[int, int, int], config: PullConfig = PULL
) -> Pull:
    """The scores of one prompt.

    Args:
        cond, empty: one row each: the prompt, and what guidance starts from.
        shape: (C, h, w) of the latents.
    """
    seeds = range(config.seed, config.seed + config.noises)
    x = seeded_noise(seeds, shape).to(cond.device)
    rows = torch.zeros(len(x), dtype=torch.long)
    both = Condition.batch([cond.take(rows), empty.take(rows)])
    total = denoiser.schedule.steps
    first, late = (ddim_timestep(config.steps, i, total) for i in (0, config.steps - 3))

    def difference(noise: torch.Tensor, t: float) -> tuple[torch.Tensor, torch.Tensor]:
        full, null = denoiser.predict(torch.cat([noise, noise]), t, both).eps.chunk(2)
        return full - null, null

    d, _ = difference(x, first)
    norms = d.flatten(1).norm(dim=1)
    # arXiv 2601.20642: both forwards take the same pure noise, also at the late timestep
    late_d, null = difference(x, late)
    # where the difference vanishes it has no direction, and counts as 0
    cosine = torch.cosine_similarity(null, late_d, dim=1).nan_to_num().flatten(1).mean(1)
    sums = config.weights[0] * norms + config.weights[1] * cosine
    sharp = None
    if config.sharpness:
        length = config.stride * x.flatten(1).norm(dim=1)
        unit = d / norms.clamp_min(1e-12).view(-1, 1, 1, 1)
        bent, _ = difference(x + unit * length.view(-1, 1, 1, 1), first)
        # Jeon et al. 2025: ||J_c d - J_u d||; J of the score -eps / sigma, and d of the two scores, so twice by sigma
        sigma = float(denoiser.schedule.scales(first)[1])
        sharp = float(((bent - d).flatten(1).norm(dim=1) / length * norms).mean()) / sigma**2
    norm, direction, weighted = torch.stack([norms.mean(), cosine.mean(), sums.mean()]).tolist()
    return Pull(norm, direction, weighted, sharp)


def prompt_scores(
    probe: Probe, cond: Condition, empty: Condition, shape: tuple[int, int, int], config: PullConfig = PULL
) -> dict[str, float | None]:
    """NeMo's score and those of the pull, by name: ``nemo``, ``norm``, ``cosine``, ``anisotropy``, ``sharpness``."""
    ((score,), _) = score_prompts(probe, [cond], shape, None)
    return {"nemo": score.value} | vars(pull(probe.denoiser, cond, empty, shape, config))
