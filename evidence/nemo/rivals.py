"""Rivals of the search on held-out pictures, each at the setting that was best on the shipped plants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...engine.nemo.block import BlockConfig, block
from ...engine.nemo.neurons import NeuronSet, fingerprint_of
from .baselines import most_frequent
from .probed_model import ProbedModel
from .remedies import Sampler, adjusted

ATTENUATED = 0.5
"""What all values are multiplied by. GUARD (arXiv 2603.00133) attenuates attention at chosen positions; this does it at
all of them."""
USUAL_NORM, FIRST_TIMESTEP = 0.5, 981.0
"""Where the embedding adjustment stops: at this fraction of the usual norm of eps_c - eps_u, at this timestep."""
ATTENUATION, CONSENSUS, ADJUSTMENT = "all values attenuated", "consensus of the searches", "embedding adjustment"
FREQUENT = "neurons of half of the LoRA's other pictures"
RIVALS = (ATTENUATION, CONSENSUS, FREQUENT, ADJUSTMENT)


def rival_samplers(
    probed: ProbedModel, texts: Sequence[str], searches: Sequence[Sequence[NeuronSet]], seeds: Sequence[int]
) -> dict[str, list[Sampler]]:
    """Rival -> how to sample each text.

    Args:
        searches: for each search seed, the neurons of each text.
    """
    every = {address: tuple(range(width)) for address, width in probed.widths().items()}
    whole = NeuronSet(every, fingerprint_of(probed.model.backbone))
    by_text, first = list(zip(*searches, strict=True)), list(searches[0])
    others = [first[:i] + first[i + 1 :] for i in range(len(first))]
    ways: dict[str, Callable[[int], Sampler]] = {
        ATTENUATION: lambda i: with_blocked(probed, texts[i], whole, seeds, ATTENUATED),
        ADJUSTMENT: lambda i: lambda: adjusted(probed, texts[i], seeds, USUAL_NORM, FIRST_TIMESTEP),
    }
    if len(searches) > 1:
        ways[CONSENSUS] = lambda i: with_blocked(probed, texts[i], most_frequent(by_text[i]), seeds)
    if len(texts) > 1:
        ways[FREQUENT] = lambda i: with_blocked(probed, texts[i], most_frequent(others[i]), seeds)
    return {name: [way(i) for i in range(len(texts))] for name, way in ways.items()}


def with_blocked(
    probed: ProbedModel, text: str, neurons: NeuronSet, seeds: Sequence[int], factor: float | None = None
) -> Sampler:
    """Samples of a text while its neurons are multiplied by a factor; None is their own."""

    def sampled() -> torch.Tensor:
        with block(probed.model.backbone, neurons, BlockConfig(factor)):
            return probed.sample([text] * len(seeds), seeds)

    return sampled
