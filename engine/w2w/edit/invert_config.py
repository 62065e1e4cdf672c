"""Settings of an inversion, and the paper's presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import refuse
from ...settings.config import Config

POSTERIORS = ("mean", "sample")


@dataclass(frozen=True)
class InvertConfig(Config):
    """Settings of an inversion. ``photo()`` and ``out_of_distribution()`` are the paper's two presets.

    Attributes:
        components: number of leading components to train; None trains all.
        steps, lr: of Adam.
        batch: noise levels per step; one in the paper.
        weight_decay: L2 in Adam, as in the published code.
        prior: weight of mean((beta / sigma)^2), which regularises towards the mean model; 0 in the paper. If a
            published space lacks a deviation, the last known one is used.
        schedule: of the learning rate, ``constant`` as in the paper, or ``cosine``.
        low, high: range of the sampled timesteps, 0 .. 999.
        antithetic: spread a batch's timesteps evenly over the range, which reduces gradient noise.
        seed: of timesteps and noise.
        check_every: steps between measurements of the loss on held-out noise, which select the best coefficients.
        together: all images show one subject and give one model; otherwise each image gives one.
        posterior: latents for training: the VAE's ``mean``, or a new ``sample`` in each step, as
            in the published code.
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
    together: bool = False
    posterior: str = "mean"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "check_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        if not 0 <= self.low < self.high <= 999:
            raise refuse("timesteps", (self.low, self.high), "0 <= low < high <= 999", "0 and 999 are the paper's")
        if self.components is not None and self.components < 1:
            raise refuse("components", self.components, "1 or more", "leave it out for all")
        if self.weight_decay < 0:
            raise refuse("weight_decay", self.weight_decay, "0 or more", "the paper's is 1e-10")
        if self.lr <= 0 or self.prior < 0 or self.schedule not in ("constant", "cosine"):
            shown = (self.lr, self.prior, self.schedule)
            raise refuse("lr, prior, schedule", shown, "lr > 0, prior >= 0, constant or cosine", "0.1, 0, constant")
        if self.posterior not in POSTERIORS:
            raise refuse("posterior", self.posterior, POSTERIORS, "mean is the usual one")

    @classmethod
    def photo(cls) -> InvertConfig:
        """Published settings for real photos: 10,000 components, lr 0.1, 400 steps."""
        return cls(10_000, 400, 0.1, weight_decay=1e-10)

    @classmethod
    def out_of_distribution(cls) -> InvertConfig:
        """Published settings for paintings, cartoons, animals: 1,000 components, lr 1, 800 steps."""
        return cls(1_000, 800, 1.0, weight_decay=0.0)


def preset(name: str) -> InvertConfig:
    """``photo``, ``out_of_distribution``, or ``quick``: fewer steps, larger batches, evenly spread timesteps."""
    presets = {
        "photo": InvertConfig.photo(),
        "out_of_distribution": InvertConfig.out_of_distribution(),
        "quick": replace(InvertConfig.photo(), steps=100, batch=8, antithetic=True, schedule="cosine", lr=1.0),
    }
    if name not in presets:
        raise refuse("preset", name, sorted(presets), "photo is the paper's")
    return presets[name]
