"""Sliders trained from pairs of images before and after an edit.

Labels define how models with an attribute differ on average, including correlated attributes. A pair defines what
should change in one person's image and what should stay, so training penalises any other change of the direction.

    min over c of E |eps_{theta_i + s a(c)}(x_t, t, prompt_i) - eps|^2,  x_0 = before_i + s (after_i - before_i)

with theta_i a model of the space, s a strength in 0 .. 1 and a(c) the weight update of coefficients c: the objective
that trained the space's LoRAs (DreamBooth's), on the paper's edit theta + a n (weights2weights, section 3.3).
Concept Sliders (Gandikota et al. 2024, section 5.2) use the two ends of a pair at strengths +1 and -1; here strengths
in between have targets, too, so that the slider is even.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ...diffusion.denoiser import Denoiser
from ...errors import refuse
from ...io.number_checks import integer
from ...jobs.run import Run, run_steps
from ...jobs.training import learning_rate, set_rate
from ...network.condition import Condition
from ...runtime.placement import onloaded
from ...runtime.progress import Progress, silent
from ...settings.w2w_options import PairConfig
from ..space.delta_space import Space
from ..space.directions import one_deviation, with_directions
from ..train.batched_lora import BatchedLora
from .inversion_space import Products, placed

S = TypeVar("S", bound=Space)


@dataclass(frozen=True)
class Pairs:
    """Images of n people (or other models of the space) before and after.

    Attributes:
        targets: (n, L, C, H, W) scaled latents of the images at strengths 1 / L .. 1; the last is "after".
        cond: n prompts that do not mention the attribute, or one for all.
        models: (n, K) coefficients of the people shown, or (1, K) for one person or the mean model in all images.
    """

    targets: torch.Tensor
    cond: Condition
    models: torch.Tensor

    def __post_init__(self) -> None:
        n = len(self.targets)
        if self.targets.ndim < 5 or not n:
            raise refuse("pairs", tuple(self.targets.shape), "(n, L, C, H, W)", "see blended")
        for name, count in (("prompts", self.cond.count), ("models", len(self.models))):
            if count not in (1, n):
                raise refuse(name, count, f"1 or {n}", "give one for all pairs, or one per pair")


def blended(before: torch.Tensor, after: torch.Tensor, levels: int = 4) -> torch.Tensor:
    """Images (n, 3, H, W) before and after -> (n, levels, 3, H, W) at strengths 1 / levels .. 1, in pixels."""
    if before.shape != after.shape:
        raise refuse("pictures after", tuple(after.shape), tuple(before.shape), "one per picture before, same size")
    strengths = torch.arange(1, levels + 1, device=before.device) / levels
    return torch.stack([torch.lerp(before, after, float(s)) for s in strengths], 1)


def train_pair_slider(
    model: Denoiser,
    space: Space,
    pairs: Pairs,
    config: PairConfig | None = None,
    start: torch.Tensor | None = None,
    folder: str | Path | None = None,
    progress: Progress = silent,
) -> torch.Tensor:
    """Trains a slider; returns the change (K,) of coefficients at strength 1.

    :func:`with_pair_slider` turns it into a direction.

    Args:
        start: (K,) initial change, such as a label's direction at a visible strength; None: none.
        folder: stores the state: the same call resumes a killed one, bit for bit.
    """
    config = config or PairConfig()
    inputs = {**model.inputs, "space": space, "pairs": pairs, "start": start}
    training = _Training(model, space, pairs, config, start)
    settings = {"settings": replace(config, save_every=1)}
    with Run(folder, "pair slider", {**inputs, **settings}) as run, onloaded(model.backbone):
        training.resume(run)
        run_steps(
            training.step,
            lambda: training.done,
            config.steps,
            save_every=config.save_every,
            progress=progress,
            save=lambda: training.save(run),
        )
    return training.change.detach().cpu() * training.unit


def with_pair_slider(space: S, name: str, change: torch.Tensor) -> S:
    """The space with a direction for a trained change (K,), of length one deviation like all directions.

    ``info["pair_sliders"]`` stores the strength at which it equals that change. It does not describe training models,
    so ``sample`` ignores it: seeds keep their models.
    """
    direction = one_deviation(space, change)
    strengths = {**space.info.get("pair_sliders", {}), name: float(change.norm() / direction.norm().clamp_min(1e-30))}
    return replace(with_directions(space, {name: direction}), info={**space.info, "pair_sliders": strengths})


class _Training:
    """The state of one training run.

    Attributes:
        change: (K,) trained change, in the units of the prepared space.
        unit: unit of the trained numbers.
        done: number of steps done.
    """

    def __init__(
        self, model: Denoiser, space: Space, pairs: Pairs, config: PairConfig, start: torch.Tensor | None
    ) -> None:
        device, k = pairs.targets.device, space.dimension
        if pairs.models.shape[1] > k:
            raise refuse("models", pairs.models.shape[1], f"up to {k} coefficients", "use models of this space")
        self.model, self.pairs, self.config = model, pairs, config
        self.space = placed(space, device)
        self.unit = self.space.unit if isinstance(self.space, Products) else 1.0
        models = torch.nn.functional.pad(pairs.models.to(device).float(), (0, k - pairs.models.shape[1]))
        self.models = models / self.unit
        begin = torch.zeros(k) if start is None else start.float()
        self._begin = begin.to(device) / self.unit
        self.change = self._begin.clone().requires_grad_()
        # without a start: three deviations of the models, typical for edits, spread over all components
        usual = 3 * self.space.deviations.float().square().mean().sqrt() / k**0.5
        size = self._begin.square().mean().sqrt() if bool(self._begin.any()) else usual
        self.rate = config.lr * float(size)
        self.adam = torch.optim.Adam([self.change], self.rate, betas=(0.9, 0.95))
        self.random, self.done = torch.Generator().manual_seed(config.seed), 0

    def step(self) -> None:
        """One Adam step."""
        with torch.enable_grad():
            (self.change.grad,) = torch.autograd.grad(self.loss(), [self.change])
        set_rate(self.adam, learning_rate(self.rate, "cosine", self.done, self.config.steps))
        self.adam.step()
        self.done += 1

    def loss(self) -> torch.Tensor:
        """The loss on newly sampled pairs, strengths, timesteps and noise."""
        targets, size, random = self.pairs.targets, self.config.batch, self.random
        who = torch.randint(len(targets), (size,), generator=random)
        level = torch.randint(targets.shape[1], (size,), generator=random)
        even = (torch.arange(size) + torch.rand(1, generator=random)) / size  # timesteps cover their range evenly
        t = (even * self.config.start_timestep).long().clamp(0, 999).to(targets.device)
        x0 = targets[who, level]
        noise = torch.randn(x0.shape, generator=random).to(x0)
        strength = ((level + 1) / targets.shape[1]).to(targets.device)
        # weights2weights, section 3.3: theta + a n, here with a strength per batch row
        rows = self.models[who if len(self.models) > 1 else torch.zeros_like(who)] + strength[:, None] * self.change
        cond = self.pairs.cond.take(who if self.pairs.cond.count > 1 else torch.zeros_like(who)).to(x0.device)
        with BatchedLora(self.model.backbone, self.space.manifest, self.space.decode(rows)):
            x_t = self.model.network_input(x0, noise, t)
            output = self.model.forward(x_t, t, cond)
        return self.model.error(output, x_t, x0, noise, t).square().mean()

    def save(self, run: Run) -> None:
        """Writes the state atomically."""
        tensors = {"change": self.change.detach(), "random": self.random.get_state()}
        run.save({"run": tensors}, {"adam": self.adam}, {"done": self.done})

    def resume(self, run: Run) -> None:
        """Resumes from a state of :meth:`save`, if there is one."""
        state = run.load({"adam": self.adam}, str(self.change.device))
        if state is None:
            return
        with torch.no_grad():
            self.change.copy_(state.tensors["run"]["change"])
        self.random.set_state(state.tensors["run"]["random"].cpu())
        self.done = integer(state.facts["done"], "steps")
