"""The other remedy: one known prompt's embedding is moved until guidance pulls no more than for ordinary captions.

The model stays as it is. It holds for the prompt at hand alone, shows less of what the prompt asks for than blocking
does, and needs a backward pass through the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..network.condition import Condition, batched_rows
from ..network.light_gradients import computed_again, copies_its_weights, parts_of
from ..runtime.finite import FiniteLosses, require_finite
from ..runtime.placement import onloaded
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from ..settings.nemo_options import FULL_STEPS
from .dose import DoseCurve, DosePoint, samples_agreeing
from .escalation import changed_prompt
from .few_step_detection import FewStepSampler
from .noise_similarity import ddim_timestep


@dataclass(frozen=True)
class AdjustConfig(Config):
    """Prompt embedding adjustment (Wen et al. 2024, section 5.1).

    Attributes:
        fraction: of the usual norm of eps_c - eps_u, that of ordinary captions, at which it stops.
        lr, steps: of AdamW; the authors' are 0.05 and 10.
        noises, seed: over which the norm is averaged, and of their generator.
    """

    fraction: float = 0.5
    lr: float = 0.05
    steps: int = 50
    noises: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.fraction > 0 and self.lr > 0) or self.steps < 1 or self.noises < 1:
            shown = (self.fraction, self.lr, self.steps, self.noises)
            raise refuse("fraction, lr, steps, noises", shown, "numbers above 0", "use 0.5, 0.05, 50 and 8")


ADJUST = AdjustConfig()


@dataclass(frozen=True)
class Adjusted:
    """A prompt's condition after the adjustment.

    Attributes:
        condition: one row, to sample with instead of the prompt's own.
        point: how many of its samples still agree with the untouched ones.
        rows: network rows that it took; those with a backward pass count three times.
        kept: the price: the fraction of the prompt's own pull that is left.
    """

    condition: Condition
    point: DosePoint
    rows: int
    kept: float = math.nan

    def text(self) -> str:
        """What it does, in a line."""
        left = samples_agreeing(self.point.to_dict())
        price = "" if math.isnan(self.kept) else f"; {self.kept:.0%} of the prompt's pull is kept"
        return f"embedding adjusted ({self.rows} evaluations): {left}{price}; the model stays as it is"


def first_timestep(denoiser: Denoiser) -> float:
    """Of a run of 50 DDIM steps."""
    return ddim_timestep(50, 0, denoiser.schedule.steps)


@torch.no_grad()
def usual_pull(
    denoiser: Denoiser, ordinary: Sequence[Condition], empty: Condition, noise: torch.Tensor, t: float
) -> float:
    """The median norm of eps_c - eps_u of ordinary captions; ``noise`` is (1, C, h, w)."""
    pulls, count = [], len(ordinary)
    for part, captions in batched_rows(ordinary, range(count), count):
        x = noise.repeat(part.stop - part.start, 1, 1, 1)
        both = (captions, empty.take(torch.zeros(len(x), dtype=torch.long)))
        full, null = (denoiser.predict(x, t, cond).eps for cond in both)
        pulls.append((full - null).flatten(1).norm(dim=1))
    return float(torch.cat(pulls).median())


def adjusted_embedding(
    denoiser: Denoiser,
    cond: Condition,
    empty: Condition,
    noise: torch.Tensor,
    target: float,
    t: float,
    config: AdjustConfig = ADJUST,
    progress: Progress = silent,
) -> tuple[Condition, int, float]:
    """The condition moved until guidance stops pulling; its steps; the fraction of the pull that is left.

    The first token is left alone.

    Args:
        cond, empty: the prompt and the empty prompt, one row each.
        noise: (B, C, h, w), over which the pull is averaged.
        target: norm of eps_c - eps_u at which it stops.
        t: the network's timestep.
    """
    if cond.text is None or empty.text is None:
        raise refuse("condition", "no text", "conditions with text states", "encode the prompts first")
    rows, kind = torch.zeros(len(noise), dtype=torch.long), cond.text.dtype
    start = cond.text[:, :1].detach().float()
    words = cond.text[:, 1:].detach().float().clone().requires_grad_(True)
    optimizer, losses, taken = torch.optim.AdamW([words], lr=config.lr), FiniteLosses("pull of the guidance"), 0
    pulls: list[float] = []

    def prompted() -> torch.Tensor:
        moved = replace(cond, text=torch.cat([start, words], 1).to(kind))
        return denoiser.predict(noise, t, moved.take(rows)).eps

    with torch.no_grad():
        unconditional = denoiser.predict(noise, t, empty.take(rows)).eps
    parts: list[torch.nn.Module] = []
    if copies_its_weights(denoiser.backbone, noise.device):
        parts = parts_of(denoiser.backbone, prompted)
    with torch.enable_grad(), computed_again(parts):
        for taken in range(1, config.steps + 1):
            # Wen et al. 2024, section 5.1: minimise || eps_c - eps_u ||
            pull = (prompted() - unconditional).float().flatten(1).norm(dim=1).mean()
            losses.see(pull)
            pulls.append(float(pull.detach()))
            if pulls[-1] <= target:
                break
            (words.grad,) = torch.autograd.grad(pull, words)
            optimizer.step()
            progress(taken, config.steps, None)
    progress(config.steps, config.steps, None)
    require_finite(words, "adjusted embedding")
    return replace(cond, text=torch.cat([start, words.detach()], 1).to(kind)), taken, pulls[-1] / max(pulls[0], 1e-12)


def adjust(
    sampler: FewStepSampler,
    cond: Condition,
    shape: tuple[int, int, int],
    config: AdjustConfig = ADJUST,
    progress: Progress = silent,
    sample_steps: int = FULL_STEPS,
) -> Adjusted:
    """Move one prompt's embedding, and sample it: how many samples still agree with the untouched ones.

    Args:
        sampler: with a threshold, guidance and ordinary captions, whose pull is the usual one.
        cond: the prompt, one row.
        shape: (C, h, w) of the latents.
        progress: counts the steps, and then UNet evaluations of the samples.
        sample_steps: of its full samples.
    """
    if sampler.empty is None or not sampler.ordinary or sampler.threshold is None:
        raise refuse("sampler", "without a threshold, an empty prompt or captions", "all three", "calibrate")
    denoiser, empty, t = sampler.denoiser, sampler.empty, first_timestep(sampler.denoiser)
    noise = torch.randn(config.noises, *shape, generator=torch.Generator().manual_seed(config.seed))
    noise = noise.to(sampler.ordinary[0].device)
    with onloaded(denoiser.backbone):
        target = config.fraction * usual_pull(denoiser, sampler.ordinary, empty, noise[:1], t)
        moved, steps, kept = adjusted_embedding(denoiser, cond, empty, noise, target, t, config, progress)
    before = sampler.forwards
    point = changed_prompt(sampler, cond, moved, shape, sample_steps, progress)
    spent = len(noise) * (1 + 3 * steps) + 2 * len(sampler.ordinary) + sampler.forwards - before
    return Adjusted(moved, point, spent, kept)


def recommended(curve: DoseCurve, adjusted: Adjusted | None = None) -> str:
    """Which of both remedies serves the prompt, in a sentence; None: the embedding was not adjusted."""
    left = f"blocking leaves it {curve.verdict}"
    if not curve.memorized:
        return "recommended: neither, the prompt is not memorized"
    if curve.verdict == "cured":
        return "recommended: blocking, which cures here and shows more of what the prompt asks for"
    if adjusted is None:
        return f"recommended: adjust, which moves this prompt's embedding and samples it; {left}"
    if adjusted.point.cures:
        price = f"keeps {adjusted.kept:.0%} of the prompt's pull"
        return f"recommended: the adjusted embedding, for this prompt alone, which {price}; {left}"
    return "recommended: neither cures; train again without the repeated picture"
