"""Rivals of the search on held-out pictures, each at the setting that was best on the shipped plants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.nemo.block import BlockConfig, block
from ...engine.nemo.neurons import NeuronSet, fingerprint_of
from .probed_model import ProbedModel
from .remedies import Sampler, adjusted

ATTENUATED = 0.5
"""What all values are multiplied by. GUARD (arXiv 2603.00133) attenuates attention at chosen positions; this does it at
all of them."""
USUAL_NORM, FIRST_TIMESTEP = 0.5, 981.0
"""Where the embedding adjustment stops: at this fraction of the usual norm of eps_c - eps_u, at this timestep."""
RIVALS = ATTENUATION, ADJUSTMENT = "all values attenuated", "embedding adjustment"


def rival_samplers(probed: ProbedModel, text: str, few: Sequence[int], fewest: Sequence[int]) -> dict[str, Sampler]:
    """Rival -> how to sample the text; ``few`` and ``fewest`` are seeds, fewest for what does not come near."""
    every = {address: tuple(range(width)) for address, width in probed.widths().items()}
    whole = NeuronSet(every, fingerprint_of(probed.model.backbone))
    return {
        ATTENUATION: with_blocked(probed, text, whole, fewest, ATTENUATED),
        ADJUSTMENT: lambda: adjusted(probed, text, few, USUAL_NORM, FIRST_TIMESTEP),
    }


def with_blocked(
    probed: ProbedModel, text: str, neurons: NeuronSet, seeds: Sequence[int], factor: float | None = None
) -> Sampler:
    """Samples of a text while its neurons are multiplied by a factor; None is their own."""

    def sampled() -> torch.Tensor:
        with block(probed.model.backbone, neurons, BlockConfig(factor)):
            return probed.sample([text] * len(seeds), seeds)

    return sampled
