"""Time and memory before a run: one forward is measured, the others are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.nemo.noise_similarity import Request, probe_noise
from ...engine.pipelines.nemo_jobs import probe_of
from ...engine.pipelines.nemo_prompts import conditions, latent_shape
from ...engine.runtime.footprint import Peak
from ...engine.settings.nemo_options import ProbeConfig
from .records import Estimate

DECODING, ENCODING = 3.0, 1.4
"""Cost of the VAE for a picture, in UNet evaluations: SD1.5 at 512 px encodes in 1117 GFLOP, its UNet takes 803
(flop counts); decoding is about twice the encoding."""
_SHORT = 2.0
"""Seconds below which the first forward, which may move weights or choose kernels, is measured again."""


@dataclass(frozen=True)
class Pace:
    """Cost of a batch row in the network on this machine.

    Attributes:
        seconds: of a batch of one; on an accelerator larger batches take less per row.
        row: peak bytes in addition to the weights.
        weights: bytes of all parts of the pipeline.
        picture: bytes at the peak of decoding one; 0 if unknown.
    """

    seconds: float
    row: int
    weights: int
    picture: int = 0

    def rows_within(self, budget: int, most: int) -> int:
        """Number of batch rows that fit half of a budget; at least one."""
        return max(1, min(most, budget // 2 // max(1, self.row)))

    def pictures_within(self, budget: int, most: int) -> int:
        """Number of pictures sampled with guidance in one batch that fit half of a budget; at least one."""
        return max(1, min(most, budget // 2 // max(1, self.sampled)))

    @property
    def sampled(self) -> int:
        """Bytes of a picture while it is sampled with guidance and decoded."""
        return max(2 * self.row, self.picture)

    def estimate(self, rows: float, held: int, why: str) -> Estimate:
        """The estimate for ``rows`` UNet evaluations, with ``held`` further bytes allocated."""
        return Estimate(rows, rows * self.seconds, held, why)

    def sampling(self, rows: float, pictures: int, steps: int, budget: int, why: str) -> Estimate:
        """The estimate for ``rows`` UNet evaluations, and for sampling pictures with guidance and decoding them."""
        scored = self.rows_within(budget, 80) * self.row if rows else 0
        held = max(self.pictures_within(budget, pictures) * self.sampled, scored)
        return self.estimate(rows + pictures * (2 * steps + DECODING), held, why)


def pace_of(pipe: Any, tools: Any, config: ProbeConfig) -> Pace:
    """Measures one batch row at the model's default size, twice if the first was short.

    Args:
        pipe: a diffusers pipeline.
        tools: the :class:`~vitrine.engine.pipelines.NEMOPipeline` made from it.
    """
    weights = sum(_bytes(part) for part in pipe.components.values() if isinstance(part, torch.nn.Module))
    with torch.no_grad():
        probe = probe_of(tools, config=config, rows=1)
        (cond,) = conditions(tools, "a photo")
        request = [Request(cond, probe_noise(config, latent_shape(tools))[:1].to(cond.text), {})]
        with Peak() as held:
            seconds = timed(lambda: probe.signals(request))
        if seconds < _SHORT:
            seconds = timed(lambda: probe.signals(request))
    return Pace(seconds, held.peak, weights, _decoding(pipe.vae, latent_shape(tools)))


def _decoding(vae: Any, shape: tuple[int, int, int]) -> int:
    """Bytes at the peak of decoding one picture, by a run on torch's meta device."""
    from diffusers import AutoencoderKL

    if type(vae) is not AutoencoderKL:
        return 0
    channels = vae.config.latent_channels
    packed = round((shape[0] / channels) ** 0.5)  # transformers see several latent positions as one
    upcast = vae.config.force_upcast and vae.dtype == torch.float16
    with torch.device("meta"), torch.no_grad():
        empty = AutoencoderKL.from_config(vae.config).to(torch.float32 if upcast else vae.dtype)
        latents = torch.zeros(1, channels, shape[1] * packed, shape[2] * packed, dtype=empty.dtype)
        with Peak() as held:
            empty.decode(latents)
    return held.peak


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a call, including an accelerator's work."""
    began = time.perf_counter()
    run()
    for name in ("cuda", "mps"):
        device = getattr(torch, name, None)
        if device is not None and device.is_available():
            device.synchronize()
    return time.perf_counter() - began


def _bytes(module: torch.nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
