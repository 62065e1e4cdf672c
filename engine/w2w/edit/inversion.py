"""Inversion of an image to a model: the coefficients with the lowest denoising loss on the image.

min over beta of E |m * (eps_theta(beta)(x_t, c, t) - eps)|^2 (weights2weights, Eq. 3), with Adam on beta only. Text
states and latents are encoded once; the published code encodes the image at every step.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...diffusion.denoiser import Denoiser
from ...diffusion.noise import generators
from ...errors import VitrineError, refuse
from ...io.number_checks import integer
from ...jobs.run import STATE, Run, run_steps, sole_owner
from ...jobs.training import learning_rate, set_rate
from ...network.condition import Condition
from ...runtime.finite import FiniteLosses
from ...runtime.placement import onloaded, refuse_without_gradients
from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from ...settings.w2w_options import InvertConfig
from ..space.delta_space import Space
from ..train.batched_lora import BatchedLora
from .inversion_space import Posterior, Products, latents_of, mask_for, placed, spread

KEPT_STATES = 3
"""Number of stopped runs whose states are kept."""


@one_line
@dataclass(frozen=True)
class Inversion:
    """Result of an inversion.

    Attributes:
        coefficients: (B, K), the best of each image by held-out loss; (1, K) for images inverted together.
        losses: (step, (B,) held-out losses, or one for images together), one entry per check.
        steps: number of steps done.
        interrupted: whether the run was stopped before its last step.
    """

    coefficients: torch.Tensor
    losses: list[tuple[int, list[float]]] = field(default_factory=list)
    steps: int = 0
    interrupted: bool = False


def invert(
    model: Denoiser,
    space: Space,
    latents: torch.Tensor | Posterior,
    cond: Condition,
    config: InvertConfig | None = None,
    mask: torch.Tensor | None = None,
    progress: Progress = silent,
    partial_on: tuple[type[BaseException], ...] = (),
) -> Inversion:
    """Inverts B images at once, each independently, or all to one model.

    In a delta space every model needs the factors of all training LoRAs: memory grows with images times LoRAs.

    Args:
        latents: (B, C, H, W) scaled posterior means, or the posterior for ``config.posterior`` "sample".
        cond: the prompt, one row for all or one per image.
        mask: (B, 1, H, W) or (1, 1, H, W) weights in [0, 1] at latent size; 0 ignores a position.
        partial_on: exceptions, such as ``KeyboardInterrupt``, on which the best result so far is returned, marked as
            interrupted.

    Raises:
        VitrineError: If samples are requested of means alone, the mask is empty, outside [0, 1] or of another size, a
            prior is requested in a space without deviations, an image's loss is not finite, or the network's layers
            are cast one by one.
        BaseException: Any exception that ends the run early, such as
            :class:`~vitrine.engine.runtime.progress.Interrupted`, unless it is in ``partial_on``.
            :func:`partial_inversion` then gives the best result so far.
    """
    return _finished(_State(model, space, latents, cond, config or InvertConfig(), mask), progress, partial_on)


def invert_in(
    folder: str | Path,
    model: Denoiser,
    space: Space,
    latents: torch.Tensor | Posterior,
    cond: Condition,
    config: InvertConfig | None = None,
    mask: torch.Tensor | None = None,
    progress: Progress = silent,
) -> Inversion:
    """:func:`invert` with its state in a folder: the same call resumes a killed one, bit for bit.

    The state is written atomically every ``check_every`` steps, at the end, and when ``progress`` ends the run.
    """
    state = _State(model, space, latents, cond, config or InvertConfig(), mask)
    with state.run_in(folder) as run:
        state.resume(run)
        return _finished(state, progress, (), run)


def invert_below(
    parent: str | Path,
    model: Denoiser,
    space: Space,
    latents: torch.Tensor | Posterior,
    cond: Condition,
    config: InvertConfig | None = None,
    mask: torch.Tensor | None = None,
    progress: Progress = silent,
) -> Inversion:
    """:func:`invert_in` with a subfolder of ``parent`` per distinct run, which is deleted when the run finishes.

    The same call resumes where it was stopped; any other starts a new run. Of runs that were stopped and never resumed,
    the last three keep their folders.
    """
    state = _State(model, space, latents, cond, config or InvertConfig(), mask)
    run = state.run_in(parent)
    run.path = Path(parent) / f"inversion-{run.mark}"
    with run:
        _drop_old_states(run.path)
        state.resume(run)
        result = _finished(state, progress, (), run)
    shutil.rmtree(run.path, ignore_errors=True)
    return result


def _drop_old_states(mine: Path) -> None:
    """Deletes all but the newest states of other runs next to ``mine`` that no process owns."""
    others = [p for p in mine.parent.glob("inversion-*") if p != mine and (p / STATE).is_file()]
    for folder in sorted(others, key=lambda p: (p / STATE).stat().st_mtime, reverse=True)[KEPT_STATES:]:
        with suppress(VitrineError), sole_owner(folder):  # refused: another process owns it
            shutil.rmtree(folder, ignore_errors=True)


def _finished(
    state: _State, progress: Progress, partial_on: tuple[type[BaseException], ...], run: Run | None = None
) -> Inversion:
    config = state.config
    refuse_without_gradients(state.model.backbone)
    try:
        with onloaded(state.model.backbone):
            run_steps(
                state.step,
                lambda: state.done,
                config.steps,
                progress=progress,
                preview=lambda: state.preview,
                save_every=config.check_every,
                save=lambda: None if run is None else state.save(run),
            )
    except BaseException as error:
        partial = state.result(interrupted=True)
        if isinstance(error, partial_on):
            return partial
        error.partial_inversion = partial  # type: ignore[attr-defined]
        raise
    state.check(state.done)
    return state.result()


def partial_inversion(error: BaseException) -> Inversion | None:
    """The best result before ``error`` ended an inversion; None if the error came from elsewhere."""
    return getattr(error, "partial_inversion", None)


class _State:
    """The state of one inversion.

    Attributes:
        beta: (M, k) trained coefficients of M = B models, or of one for all images.
        best: (M, K) the coefficients with the lowest held-out loss so far.
        losses: as in :class:`Inversion`.
        done: number of steps done.
        preview: (1, C, h, w) the model's x0 prediction of the last step; None before.
    """

    def __init__(
        self,
        model: Denoiser,
        whole: Space,
        latents: torch.Tensor | Posterior,
        cond: Condition,
        config: InvertConfig,
        mask: torch.Tensor | None,
    ) -> None:
        latents, self.deviations = latents_of(latents, config.posterior)
        device, k = latents.device, min(config.components or whole.dimension, whole.dimension)
        space = placed(whole.first(k), device)  # untrained components stay on their device
        self.model, self.space, self.config, self.cond = model, space, config, cond
        self.latents, self.mask, self.done, self._whole = latents, mask_for(mask, latents), 0, whole
        # always float32: with lr 0.1, bfloat16 coefficients stop changing at 32
        models = 1 if config.together else len(latents)
        self.beta = torch.zeros(models, k, device=device, requires_grad=True)
        self.adam = torch.optim.Adam([self.beta], config.lr, weight_decay=config.weight_decay)
        self.sigma = spread(space.deviations[:k], config.prior).to(device)
        self.losses: list[tuple[int, list[float]]] = []
        self._finite = FiniteLosses("inversion's loss")
        self.preview: torch.Tensor | None = None
        self.best = torch.zeros(models, whole.dimension, device=device)
        self._random = generators([config.seed] * len(latents))
        self._lowest = torch.full((models,), math.inf)
        self._held_out = self._draw(generators([config.seed + 77_777] * len(latents)), 8, True)

    def step(self) -> None:
        """One Adam step on the coefficients."""
        config, number = self.config, self.done + 1
        with torch.enable_grad():
            losses = self.loss(*self._draw(self._random, config.batch, config.antithetic))
            self._finite.see(losses)
            loss = losses.sum()
            if config.prior:  # negative log-density of the sampling Gaussian, up to constants
                loss = loss + config.prior * (self.beta / self.sigma).square().mean(1).sum()
            (self.beta.grad,) = torch.autograd.grad(loss, [self.beta])
        set_rate(self.adam, learning_rate(config.lr, config.schedule, number - 1, config.steps))
        self.adam.step()
        self.done = number
        if number % config.check_every == 0:
            self.check(number)

    def loss(self, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(M,) masked errors; as in the published code, the mean is over all elements, including masked ones."""
        pictures = len(self.latents)
        picture = torch.arange(pictures).repeat_interleave(len(x0) // pictures)
        theta = self.space.decode(self.beta)
        with BatchedLora(self.model.backbone, self.space.manifest, theta):
            x_t = self.model.network_input(x0, noise, t)
            output = self.model.forward(x_t, t, self.cond.take(picture).to(x0.device))
        least = t.argmin().reshape(1)  # the least noisy row, for the preview; its index stays on the device
        self.preview = self.model.split(output, x_t, t).x0.detach().index_select(0, least)
        # weights2weights, Eq. 3: |m * (eps_theta(beta)(x_t, c, t) - eps)|^2, generalised to any training target
        error = (self.model.error(output, x_t, x0, noise, t) * self.mask[picture]).square()
        return error.flatten(1).mean(1).view(len(self.beta), -1).mean(1)

    def _draw(
        self, random: list[torch.Generator], each: int, even: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Samples x0, t and noise of ``each`` batch rows per image; ``even`` spreads the timesteps over their range."""
        config, device, shape = self.config, self.latents.device, self.latents.shape[1:]
        span, noises, times, samples = config.high + 1 - config.low, [], [], []
        for generator in random:
            noises.append(torch.randn(each, *shape, generator=generator))
            if even:
                offset = torch.rand(1, generator=generator)
                times.append(config.low + ((torch.arange(each) + offset) * span / each).long())
            else:
                times.append(torch.randint(config.low, config.high + 1, (each,), generator=generator))
            if self.deviations is not None:
                samples.append(torch.randn(each, *shape, generator=generator))
        x0 = self.latents.repeat_interleave(each, 0)
        if self.deviations is not None:
            x0 = x0 + self.deviations.repeat_interleave(each, 0) * torch.cat(samples).to(device)
        return x0, torch.cat(times).to(device), torch.cat(noises).to(device)

    @torch.no_grad()
    def check(self, number: int) -> None:
        """Measures the loss on held-out noise and keeps each image's best coefficients."""
        if self.losses and self.losses[-1][0] == number:
            return
        losses = self.loss(*self._held_out).cpu()
        if bool((lost := ~losses.isfinite()).any()):
            shown = f"{losses[lost][0]} for model {int(lost.nonzero()[0])} after {number} steps"
            raise refuse("inversion's loss", shown, "a number", "use a smaller learning rate, or a float32 network")
        self.losses.append((number, [round(v, 6) for v in losses.tolist()]))
        better = (losses < self._lowest).nonzero().flatten()
        self._lowest[better] = losses[better]
        self.best[better, : self.beta.shape[1]] = self.beta.detach()[better.to(self.beta.device)]

    def run_in(self, folder: str | Path) -> Run:
        """This inversion as a resumable job in a folder."""
        pictures = {"pictures": [self.latents, self.deviations], "mask": self.mask, "prompt": self.cond}
        inputs = {**self.model.inputs, "space": self._whole, **pictures, "settings": self.config}
        return Run(folder, "W2W inversion", inputs)

    def save(self, run: Run) -> None:
        """Writes the state atomically."""
        tensors = {"beta": self.beta.detach(), "best": self.best, "lowest": self._lowest}
        tensors |= {f"random{i}": generator.get_state() for i, generator in enumerate(self._random)}
        run.save({"run": tensors}, {"adam": self.adam}, {"done": self.done, "losses": self.losses})

    def resume(self, run: Run) -> None:
        """Resumes from a state of :meth:`save`, if there is one."""
        state = run.load({"adam": self.adam}, str(self.beta.device))
        if state is None:
            return
        tensors = state.tensors["run"]
        with torch.no_grad():
            self.beta.copy_(tensors["beta"])
        self.best, self._lowest = tensors["best"], tensors["lowest"].cpu()
        for i, generator in enumerate(self._random):
            generator.set_state(tensors[f"random{i}"].cpu())
        self.done = integer(state.facts["done"], "steps")
        self.losses = [(integer(step, "step"), list(losses)) for step, losses in state.facts["losses"]]

    def result(self, interrupted: bool = False) -> Inversion:
        """The best coefficients; the current ones if none have been checked yet."""
        if not self.losses:
            self.best[:, : self.beta.shape[1]] = self.beta.detach()
        unit = self.space.unit if isinstance(self.space, Products) else 1.0
        return Inversion(self.best.cpu() * unit, self.losses, self.done, interrupted)
