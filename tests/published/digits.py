"""The published network of digits, sampled as its author samples it, and a judge of what it draws."""

from __future__ import annotations

import functools
import gzip
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vitrine.engine import families
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine_tests.published.bring import table
from vitrine_tests.published.mnist_family import CLASSES, FILE, NO_CLASS, digits
from vitrine_tests.published.weights import by_hand, entry_of, file_of

SHAPE = (1, 28, 28)
SAMPLES = 400
LABELS = torch.arange(SAMPLES) % CLASSES


def published_state() -> dict[str, torch.Tensor]:
    """The author's weights; a pickle, read without running anything."""
    state: dict[str, torch.Tensor] = torch.load(file_of(entry_of(FILE)), weights_only=True)
    return state


def denoiser_of(net: nn.Module) -> Denoiser:
    """A flow, as the family calls it."""
    return Denoiser(net, NoiseSchedule.flow(), "flow", families.call_of(net))


@torch.no_grad()
def sampled(net: nn.Module, steps: int = 25, guidance: float = 2.0) -> torch.Tensor:
    """Digits of :data:`LABELS` by Euler's steps; guidance in the middle of the way only, as the author's script."""
    denoiser, x = denoiser_of(net), seeded_noise(list(range(SAMPLES)), SHAPE)
    cond, none = digits(LABELS.tolist()), digits([NO_CLASS] * SAMPLES)
    for i in range(steps):
        s, after = 1 - i / steps, 1 - (i + 1) / steps
        v = denoiser.forward(x, 1000 * s, cond)
        if 0.3 < s < 0.7:
            bare = denoiser.forward(x, 1000 * s, none)
            v = bare + guidance * (v - bare)
        x = x + (after - s) * v
    return x


def mnist() -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's 10,000 pictures (N, 1, 28, 28) in [0, 1] that are no training pictures of the network, and classes."""
    pictures, classes = (gzip.decompress(by_hand(e)) for e in table("others.json") if e["as"] == "digits")
    pixels = torch.frombuffer(bytearray(pictures[16:]), dtype=torch.uint8).view(-1, *SHAPE).float() / 255
    return pixels, torch.frombuffer(bytearray(classes[8:]), dtype=torch.uint8).long()


@functools.cache
def judge() -> tuple[Any, float]:
    """A small classifier of 8000 of these pictures, and its accuracy on the other 2000."""
    pixels, labels = mnist()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU())
        net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1568, CLASSES))
        optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        for _ in range(4):
            for part in torch.randperm(8000).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(pixels[part]), labels[part]).backward()
                optimizer.step()
    with torch.no_grad():
        return net, float((net(pixels[8000:]).argmax(1) == labels[8000:]).float().mean())


@torch.no_grad()
def accuracy(pictures: torch.Tensor) -> float:
    """Fraction of digits (400, 1, 28, 28) that the judge reads as the class of :data:`LABELS` they were asked for."""
    return round(float((judge()[0](pictures.clamp(0, 1)).argmax(1) == LABELS).float().mean()), 4)


def variety(pictures: torch.Tensor) -> float:
    """Mean distance of two digits of a class."""
    classes = pictures.view(-1, CLASSES, pictures[0].numel()).transpose(0, 1)
    return float(torch.stack([torch.pdist(each).mean() for each in classes]).mean())


def grey(pictures: torch.Tensor) -> float:
    """Fraction of pixels that are neither ink nor paper: blur."""
    return float(((pictures > 0.1) & (pictures < 0.9)).float().mean())
