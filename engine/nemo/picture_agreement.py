"""How much the few-step samples of one prompt agree from seed to seed, and where in the picture.

One step looks where nothing is decided yet; four steps give a coarse picture, which can be compared as a picture is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..diffusion.denoiser import Denoiser
from ..diffusion.guidance import guide
from ..diffusion.noise import seeded_noise
from ..diffusion.schedule import NoiseSchedule, append_dims
from ..errors import refuse
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from .blocked_copies import SIDE
from .nearest import PictureIndex, thumbnails
from .ssim import betas_for, ms_ssim


def few_timesteps(schedule: NoiseSchedule, steps: int, shift: float = 1.0) -> list[float]:
    """``steps`` of the network's timesteps, the first the one of most noise, evenly spaced down to 0 (not included).

    Args:
        shift: of a flow's times towards noise (Esser et al. 2024, Eq. 23); 1 changes nothing.
    """
    times = [1 - i / steps for i in range(steps)]
    if schedule.kind == "flow":
        times = [shift * s / (1 + (shift - 1) * s) for s in times]
    return [schedule.last * s for s in times]


@torch.no_grad()
def few_step_samples(
    denoiser: Denoiser, seeds: Sequence[int], shape: Sequence[int], cond: Condition, null: Condition | None,
    guidance: float, timesteps: Sequence[float], progress: Progress = silent,
) -> torch.Tensor:  # fmt: skip
    """Clean latents (S, *shape) of one prompt, a row for each seed, by deterministic steps.

    Args:
        cond, null: the prompt's condition and that of the empty prompt, one row each; without ``null``, or at guidance
            1, the prompt alone is evaluated.
        timesteps: descending, the first near the schedule's last; see :func:`few_timesteps`.
    """
    rows = torch.zeros(len(seeds), dtype=torch.long)
    guided = null is not None and guidance != 1
    both = [cond.take(rows), null.take(rows)] if null is not None and guided else [cond.take(rows)]
    device = cond.text.device if cond.text is not None else next(denoiser.backbone.parameters()).device
    x = seeded_noise(seeds, shape).to(device)
    for i, t in enumerate(timesteps):
        eps, x0 = denoiser.predict(x.repeat(len(both), *[1] * (x.ndim - 1)), t, Condition.batch(both))
        if guided:
            eps, x0 = (_guided(part, guidance) for part in (eps, x0))
        progress(i + 1, len(timesteps), None)
        if i + 1 == len(timesteps):
            break
        # DDIM without new noise (Song et al. 2021, Eq. 12)
        signal, level = (append_dims(s.to(x), x.ndim) for s in denoiser.schedule.scales(timesteps[i + 1]))
        x = signal * x0 + level * eps
    return x0


def _guided(both: torch.Tensor, guidance: float) -> torch.Tensor:
    """Of rows with the prompt, then those without it."""
    full, null = both.chunk(2)
    return guide(null, full, guidance)


@dataclass(frozen=True)
class Agreement:
    """Of the samples of one prompt.

    Attributes:
        similarity: (S (S - 1) / 2,) MS-SSIM of each pair at 64 px, 0..1.
        ratios: (S,) distance of each sample to the nearest other one, as a share of the usual distance.
        maps: (S, 64, 64) the same share around each pixel.
        areas: (S,) 0..1, share of the picture where a sample is nearer to another than a third of what is usual.
    """

    similarity: torch.Tensor
    ratios: torch.Tensor
    maps: torch.Tensor
    areas: torch.Tensor

    @property
    def median(self) -> float:
        """Median similarity over pairs: how alike the prompt's samples are."""
        return float(self.similarity.median())


def agreement(pictures: torch.Tensor, usual: torch.Tensor) -> Agreement:
    """Agreement of the samples (S, 3, H, W) in [0, 1] of one prompt.

    Args:
        usual: (R, 3, 64, 64) thumbnails of samples of other prompts, whose distances are the usual ones.

    Raises:
        VitrineError: There are fewer than two samples, or usual ones.
    """
    if min(len(pictures), len(usual)) < 2:
        raise refuse("samples, usual samples", (len(pictures), len(usual)), "2 or more of each", "take more seeds")
    small = thumbnails(pictures)
    near = PictureIndex(None, usual).nearest(small)
    first, second = torch.triu_indices(len(small), len(small), 1)
    similarity = ms_ssim(small[first], small[second], betas_for(SIDE), 1.0)
    return Agreement(similarity, near.ratios, near.maps, near.areas)
