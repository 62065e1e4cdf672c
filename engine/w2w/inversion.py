"""One picture to one model: find the coefficients under which the network predicts the picture's noise best.

min over beta of E |m * (eps_theta(beta)(x_t, c, t) - eps)|^2 (weights2weights, Eq. 3), Adam on beta only. The text
states and the picture's latents are encoded once; the published code encodes the picture anew at every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..condition import Condition
from ..config import Config
from ..denoiser import Denoiser
from ..errors import refuse
from ..progress import Progress, silent
from .batched_lora import BatchedLora
from .directions import Space
from .space import WeightSpace


@dataclass(frozen=True)
class InvertConfig(Config):
    """How a picture is inverted. ``photo()`` and ``out_of_distribution()`` are the paper's two presets.

    Attributes:
        components: the first ones to train; None: all.
        steps, lr: of Adam. batch: noise levels in each step; the paper takes one picture and one level.
        weight_decay: L2 in Adam, as in the published code.
        prior: weight of mean((beta / sigma)^2), which pulls towards the mean model; 0 as in the paper.
        schedule: of the learning rate, ``constant`` as in the paper or ``cosine``.
        low, high: range of timesteps drawn.
        antithetic: draw times evenly over the range within a batch, for less noise in the gradient.
        seed: of times and noise.
        check_every: steps between readings of the loss on held-out noise, by which the best so far is kept.
    """

    components: int | None = None
    steps: int = 400
    lr: float = 0.1
    batch: int = 1
    weight_decay: float = 1e-10
    prior: float = 0.0
    schedule: str = "constant"
    low: int = 0
    high: int = 999
    antithetic: bool = False
    seed: int = 0
    check_every: int = 25

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "check_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        if not 0 <= self.low < self.high <= 999:
            raise refuse("timesteps", (self.low, self.high), "0 <= low < high <= 999", "0 and 999 are the paper's")
        if self.lr <= 0 or self.prior < 0 or self.schedule not in ("constant", "cosine"):
            given = (self.lr, self.prior, self.schedule)
            raise refuse("lr, prior, schedule", given, "lr > 0, prior >= 0, constant or cosine", "0.1, 0, constant")

    @classmethod
    def photo(cls) -> InvertConfig:
        """Published settings for real photos: 10,000 components, lr 0.1, 400 steps."""
        return cls(10_000, 400, 0.1, weight_decay=1e-10)

    @classmethod
    def out_of_distribution(cls) -> InvertConfig:
        """Published settings for paintings, cartoons, animals: 1,000 components, lr 1, 800 steps."""
        return cls(1_000, 800, 1.0, weight_decay=0.0)


@dataclass(frozen=True)
class Inversion:
    """Result: (B, K) coefficients, the best by held-out loss; losses as (step, (B,) held-out loss); steps done."""

    coefficients: torch.Tensor
    losses: list[tuple[int, list[float]]] = field(default_factory=list)
    steps: int = 0
    interrupted: bool = False


def invert(
    model: Denoiser, space: Space, latents: torch.Tensor, cond: Condition, config: InvertConfig | None = None,
    mask: torch.Tensor | None = None, deviations: torch.Tensor | None = None, progress: Progress = silent,
) -> Inversion:  # fmt: skip
    """Coefficients for B pictures at once, each as if it were alone.

    Args:
        latents: (B, C, H, W) scaled posterior means.
        cond: the prompt, one row for all or one for each picture.
        mask: (B, 1, H, W) or (1, 1, H, W) weights in [0, 1] at latent size; 0 leaves a place out.
        deviations: (B, C, H, W) posterior deviations; given, latents are drawn anew at each step.

    An interruption raised by ``progress`` is caught: what was best so far is returned with ``interrupted`` set.

    Raises:
        VitrineError: a mask outside [0, 1] or of another size, a delta space, an empty mask.
    """
    config = config or InvertConfig()
    run = _Run(model, _factors(space), latents, cond, config, _mask(mask, latents), deviations)
    done, stopped = 0, False
    try:
        for done in range(1, config.steps + 1):
            run.step(done)
            progress(done, config.steps, None)
    except BaseException as error:
        if isinstance(error, Exception) and not _is_interruption(error):
            raise
        stopped = True
    run.check(done)
    return Inversion(run.best.cpu(), run.losses, done, stopped)


def _is_interruption(error: Exception) -> bool:
    """ComfyUI's own interruption, or ours; told by name, because the engine never imports ComfyUI."""
    return "interrupt" in type(error).__name__.lower()


class _Run:
    def __init__(
        self, model: Denoiser, space: WeightSpace, latents: torch.Tensor, cond: Condition, config: InvertConfig,
        mask: torch.Tensor, deviations: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.model, self.space, self.config, self.cond = model, space, config, cond
        self.latents, self.mask, self.deviations = latents, mask, deviations
        device, used = latents.device, min(config.components or space.dimension, space.dimension)
        # float32 whatever the network is: with lr 0.1, bfloat16 coefficients stop moving at 32
        self.beta = torch.zeros(len(latents), used, device=device, requires_grad=True)
        self.adam = torch.optim.Adam([self.beta], config.lr, weight_decay=config.weight_decay)
        self.random = [torch.Generator().manual_seed(config.seed) for _ in latents]
        self.sigma = space.deviations[:used].to(device)
        self.losses: list[tuple[int, list[float]]] = []
        self.best = torch.zeros(len(latents), space.dimension, device=device)
        self._lowest = torch.full((len(latents),), math.inf)
        self._held_out = self._draw([torch.Generator().manual_seed(config.seed + 77_777) for _ in latents], 8, True)

    def step(self, number: int) -> None:
        """One Adam step on the coefficients."""
        config = self.config
        with torch.enable_grad():
            loss = self.loss(*self._draw(self.random, config.batch, config.antithetic)).sum()
            if config.prior:  # the negative log of the sampling Gaussian, up to constants
                loss = loss + config.prior * (self.beta / self.sigma).square().mean(1).sum()
            (self.beta.grad,) = torch.autograd.grad(loss, [self.beta])
        if config.schedule == "cosine":
            rate = config.lr * 0.5 * (1 + math.cos(math.pi * (number - 1) / config.steps))
            for group in self.adam.param_groups:
                group["lr"] = rate
        self.adam.step()
        if number % config.check_every == 0:
            self.check(number)

    def loss(self, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(B,) masked errors, the mean over all elements, masked zeros included, as published."""
        models = len(self.beta)
        each = len(x0) // models
        rows = torch.arange(models).repeat_interleave(each)
        theta = self.space.decode(self.beta)
        with BatchedLora(self.model.backbone, self.space.manifest, theta):
            x_t = self.model.network_input(x0, noise, t)
            found = self.model.predict(x_t, t, self.cond.take(rows).to(x0.device)).eps
        error = ((found - noise) * self.mask[rows]).square()
        return error.flatten(1).mean(1).view(models, each).mean(1)

    def _draw(
        self, generators: list[torch.Generator], each: int, even: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device, shape = self.latents.device, self.latents.shape[1:]
        span, parts = self.config.high + 1 - self.config.low, []
        for row, random in enumerate(generators):
            x0 = self.latents[row : row + 1].expand(each, *shape)
            if self.deviations is not None:
                own = torch.randn(each, *shape, generator=random).to(device)
                x0 = x0 + self.deviations[row : row + 1] * own
            noise = torch.randn(each, *shape, generator=random).to(device)
            if even:
                offset = torch.rand(1, generator=random)
                t = self.config.low + ((torch.arange(each) + offset) * span / each).long()
            else:
                t = torch.randint(self.config.low, self.config.high + 1, (each,), generator=random)
            parts.append((x0, t.to(device), noise))
        x0, t, noise = (torch.cat(part) for part in zip(*parts, strict=True))
        return x0, t, noise

    @torch.no_grad()
    def check(self, number: int) -> None:
        """Read the loss on held-out noise and keep each picture's best coefficients."""
        if self.losses and self.losses[-1][0] == number:
            return
        found = self.loss(*self._held_out).cpu()
        self.losses.append((number, [round(v, 6) for v in found.tolist()]))
        better = (found < self._lowest).nonzero().flatten()
        self._lowest[better] = found[better]
        used = self.beta.shape[1]
        self.best[better, :used] = self.beta.detach()[better.to(self.beta.device)]


def _factors(space: Space) -> WeightSpace:
    if not isinstance(space, WeightSpace):
        remedy = "build the space in factors mode, or encode a LoRA trained on the picture"
        raise refuse("space", "delta mode", "factors mode", remedy)
    if not space.components.is_inference():
        return space
    # loaded inside torch.inference_mode(), as ComfyUI's nodes are run; autograd takes copies only
    return replace(
        space,
        mean=space.mean.clone(),
        scale=space.scale.clone(),
        components=space.components.clone(),
        singular_values=space.singular_values.clone(),
    )


def _mask(mask: torch.Tensor | None, latents: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return torch.ones(len(latents), 1, 1, 1, device=latents.device)
    mask = mask.float().to(latents.device)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-2:] != latents.shape[-2:]:
        given = tuple(mask.shape)
        raise refuse("mask", given, f"(B, 1, {latents.shape[-2]}, {latents.shape[-1]})", "resize it to latent size")
    if float(mask.min()) < 0 or float(mask.max()) > 1:
        span = (float(mask.min()), float(mask.max()))
        raise refuse("mask values", span, "0 .. 1", "divide an 8-bit mask by 255")
    if not float(mask.flatten(1).sum(1).min()) > 0:
        raise refuse("mask", "empty", "a mask that covers the subject", "paint the subject white")
    return mask.expand(len(latents), *mask.shape[1:])


def latent_mask(mask: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """An image-size mask (B, H, W) or (B, 1, H, W) in [0, 1] -> (B, 1, height, width) by area means.

    Resize or crop it together with its picture first: the published code squeezes the mask to a square while the
    picture is cropped at random.
    """
    mask = mask[:, None] if mask.ndim == 3 else mask
    return torch.nn.functional.adaptive_avg_pool2d(mask.float(), (height, width))


def preset(name: str) -> InvertConfig:
    """``photo``, ``out_of_distribution``, or ``quick``: fewer steps of larger batches with evenly drawn times."""
    table: dict[str, Any] = {
        "photo": InvertConfig.photo(),
        "out_of_distribution": InvertConfig.out_of_distribution(),
        "quick": replace(InvertConfig.photo(), steps=100, batch=8, antithetic=True, schedule="cosine", lr=1.0),
    }
    if name not in table:
        raise refuse("preset", name, sorted(table), "photo is the paper's")
    return table[name]
