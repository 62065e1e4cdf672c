"""A toy dataset with rare modes that captions do not mention, and rank-limited students of its exact teacher.

Four captions; under each a main mode (92 %) and three rare ones (5, 2, 1 %) in four dimensions. alpha is 1, sigma the
noise level (EDM's convention), all float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...engine.emd.chain import EStepConfig, Joint, NoiseLevels, ScoreDifference, e_step, normal_from
from ...engine.jobs.training import MovingAverage
from ..metrics import precision_recall

SHARES = (0.92, 0.05, 0.02, 0.01)
CAPTIONS, SIZE, DEVIATION, RARE_DISTANCE = 4, 4, 0.3, 3.0
LOWEST_SIGMA, HIGHEST_SIGMA, START_SIGMA = 0.2, 5.0, 3.0
"""Noise levels of the training, and that at which the generator starts from the teacher's denoiser."""


@dataclass(frozen=True)
class RareModes:
    """The exact teacher.

    Attributes:
        modes: (captions, 4, size) centres; the first of each caption is the main one.
    """

    modes: torch.Tensor

    @classmethod
    def draw(cls) -> RareModes:
        """Main modes on the corners of a square, rare ones 3 away from theirs, in separate directions."""
        main = torch.zeros(CAPTIONS, 1, SIZE)
        main[:, 0, :2] = 2 * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        ways = torch.zeros(CAPTIONS, 3, SIZE)
        for i in range(3):
            ways[:, i, (2, 3, 2)[i]] = (1.0, 1.0, -1.0)[i]
        return cls(torch.cat([main, main + RARE_DISTANCE * ways], 1))

    def samples(self, captions: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
        """(B, size) of the teacher, for (B,) captions."""
        which = torch.multinomial(torch.tensor(SHARES), len(captions), replacement=True, generator=gen)
        return self.modes[captions, which] + DEVIATION * torch.randn(len(captions), SIZE, generator=gen)

    def denoised(self, x: torch.Tensor, sigma: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """E[x0 | x] at (B, 1) sigma: exact."""
        modes, var = self.modes[captions], DEVIATION**2 + sigma.square()
        fraction = torch.softmax(
            torch.tensor(SHARES).log() - (x[:, None] - modes).square().sum(-1) / (2 * var), 1
        )  # the four modes' responsibilities
        centre = (fraction[:, :, None] * modes).sum(1)
        return centre + DEVIATION**2 / var * (x - centre)

    def shares(self, samples: torch.Tensor, captions: torch.Tensor) -> list[float]:
        """Fractions of samples within 4 deviations of each of the four modes."""
        difference = (samples[:, None] - self.modes[captions]).norm(dim=-1)
        inside = difference < 4 * DEVIATION * math.sqrt(SIZE / 2)
        return [float((inside[:, k] & (difference.argmin(1) == k)).double().mean()) for k in range(len(SHARES))]


class Denoiser(nn.Module):
    """A small EDM denoiser (Karras et al. 2022, Eq. 7) of x, sigma and a caption; its linear layers take adapters."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        sizes = [SIZE + CAPTIONS + 2, width, width, SIZE]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, captions: torch.Tensor, adapter: Adapter | None = None):
        """x0 of (B, size), at (B, 1) sigma."""
        deviation = 2.0
        total = (sigma.square() + deviation**2).sqrt()
        level = sigma.log() / 4
        hidden = torch.cat([x / total, functional.one_hot(captions, CAPTIONS).float(), level, level.square()], 1)
        for i, layer in enumerate(self.layers):
            out = layer(hidden)
            if adapter is not None:
                out = out + hidden @ adapter.down[i].T @ adapter.up[i].T
            hidden = out if i + 1 == len(self.layers) else functional.silu(out)
        return deviation**2 / total.square() * x + sigma * deviation / total * hidden


class Adapter(nn.Module):
    """LoRA matrices of each layer: the student, or its score."""

    def __init__(self, net: Denoiser, rank: int, gen: torch.Generator) -> None:
        super().__init__()
        layers = [layer for layer in net.layers if isinstance(layer, nn.Linear)]
        draw = partial(torch.randn, generator=gen)
        self.down = nn.ParameterList(draw(rank, m.in_features) / math.sqrt(m.in_features) for m in layers)
        self.up = nn.ParameterList(torch.zeros(m.out_features, rank) for m in layers)


def fitted(toy: RareModes, steps: int = 1500, seed: int = 0) -> Denoiser:
    """A denoiser fitted to the dataset's samples: the initial weights of students and their scores."""
    gen = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    net = Denoiser()
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(steps):
        captions = torch.randint(CAPTIONS, (512,), generator=gen)
        x0, sigma = toy.samples(captions, gen), _levels(512, gen)
        noisy = x0 + sigma * torch.randn(x0.shape, generator=gen)
        weight = (sigma.square() + 4) / (2 * sigma).square()  # Karras et al. 2022: 1 / c_out^2
        loss = (weight * (net(noisy, sigma, captions) - x0).square()).mean()
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        adam.step()
    return net.requires_grad_(False)


def _levels(count: int, gen: torch.Generator) -> torch.Tensor:
    fraction = torch.rand(count, 1, generator=gen)
    return torch.exp(math.log(LOWEST_SIGMA) + math.log(HIGHEST_SIGMA / LOWEST_SIGMA) * fraction)


class Course(NamedTuple):
    """How rank-limited students are trained.

    Attributes:
        rank: of the generator's adapter; the score's has twice as much.
        batch: samples of each update.
        lr, lr_score: Adam's.
        ema: decay of the generator's average.
    """

    rank: int = 4
    batch: int = 128
    lr: float = 1e-3
    lr_score: float = 3e-3
    ema: float = 0.99


@dataclass
class Run:
    """A student in training.

    Attributes:
        updates: done so far.
        calls: batches through a score network, the teacher's and student's in the E-step and the student's in its
            own training.
        seconds: processor time spent in updates.
    """

    toy: RareModes
    net: Denoiser
    config: EStepConfig
    course: Course
    seed: int

    def __post_init__(self) -> None:
        self.gen = torch.Generator().manual_seed(self.seed)
        self.generator = Adapter(self.net, self.course.rank, self.gen)
        self.score = Adapter(self.net, 2 * self.course.rank, self.gen)
        rates = ((self.generator, self.course.lr), (self.score, self.course.lr_score))
        self.adams = [torch.optim.Adam(part.parameters(), lr=rate, betas=(0.0, 0.99)) for part, rate in rates]
        self.average = MovingAverage(dict(self.generator.named_parameters()))
        self.updates, self.calls, self.seconds = 0, 0, 0.0

    def draw(self, z: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """g(z, c): the denoiser at the start level."""
        sigma = torch.full((len(z), 1), START_SIGMA)
        return self.net(START_SIGMA * z, sigma, captions, self.generator)

    def step(self) -> None:
        """Score update, E-step, M-step."""
        began = time.process_time()
        captions = torch.randint(CAPTIONS, (self.course.batch,), generator=self.gen)
        z, eps, noise = (torch.randn(self.course.batch, SIZE, generator=self.gen) for _ in range(3))
        with torch.no_grad():
            y = self.draw(z, captions)
        level = _levels(len(z), self.gen)
        weight = (level.square() + 4) / (2 * level).square()
        fake = self.net(y + level * noise, level, captions, self.score)
        self._update(1, (weight * (fake - y).square()).mean())
        sigma = _levels(len(z), self.gen)
        self.generator.requires_grad_(False)
        rho = Joint(
            lambda u: self.draw(u, captions),
            partial(self._difference, sigma, captions),
            NoiseLevels(torch.ones(()), sigma),
        )
        end = e_step(rho, z, eps, self.config, normal_from(self.gen))
        self.generator.requires_grad_(True)
        y = self.draw(end.z, captions)
        target = (y + sigma * end.r).detach()
        self._update(0, 0.5 * (y - target).square().sum(1).mean())
        self.average.update(dict(self.generator.named_parameters()), self.course.ema)
        self.updates, self.calls = self.updates + 1, self.calls + 1 + 2 * self.config.steps
        self.seconds += time.process_time() - began

    def _difference(self, sigma: torch.Tensor, captions: torch.Tensor, x: torch.Tensor) -> ScoreDifference:
        teacher = self.toy.denoised(x, sigma, captions)
        return ScoreDifference((teacher - self.net(x, sigma, captions, self.score)) / sigma)

    def _update(self, which: int, loss: torch.Tensor) -> None:
        self.adams[which].zero_grad()
        loss.backward()
        self.adams[which].step()

    @torch.no_grad()
    def judged(self, count: int = 20_000) -> dict[str, float]:
        """The averaged student: fractions of rare modes and of samples near no mode, precision, recall on 2,000."""
        gen = torch.Generator().manual_seed(99)
        captions = torch.randint(CAPTIONS, (count,), generator=gen)
        real, z = self.toy.samples(captions, gen), torch.randn(count, SIZE, generator=gen)
        live = {name: p.clone() for name, p in self.generator.named_parameters()}
        self.generator.load_state_dict(self.average.values)
        drawn = self.draw(z, captions)
        self.generator.load_state_dict(live)
        fractions = self.toy.shares(drawn, captions)
        precision, recall = precision_recall(real[:2000], drawn[:2000])
        names = ("5 %", "2 %", "1 %")
        row = {name: round(100 * fraction, 3) for name, fraction in zip(names, fractions[1:], strict=True)}
        return row | {"near none": round(100 * (1 - sum(fractions)), 2), "precision": precision, "recall": recall}


def snapshots(run: Run, calls: int, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Trains until both budgets are spent, and evaluates the student at each: ("calls" or "time", figures)."""
    waiting = {"calls", "time"}
    while waiting:
        run.step()
        for name, spent in (("calls", run.calls >= calls), ("time", run.seconds >= seconds)):
            if spent and name in waiting:
                waiting.remove(name)
                yield name, run.judged() | {"updates": run.updates}
