"""What a neuron encodes: how unusual a prompt makes it, which tokens drive it, what returns when it alone is free.

And a picture of which neurons were found, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .neuron_statistics import NeuronStatistics
from .neurons import NeuronSet
from .search import Outcome

TOKENS = 3
"""How many of the tokens that drive a neuron most are named."""
DARK, BRIGHT = (0.16, 0.18, 0.22), (1.0, 0.78, 0.24)
"""Of a neuron that is not in a set, and of one that is."""


@dataclass(frozen=True)
class NeuronStats:
    """The values of one site for one prompt, averaged over noises where they need any.

    Attributes:
        activations: (width,) mean over tokens of their magnitudes, as :func:`~vitrine.engine.nemo.value_activations`.
        tokens, strongest: (n, width) positions of the tokens with the largest magnitudes, and these, largest first.
    """

    activations: torch.Tensor
    tokens: torch.Tensor
    strongest: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> NeuronStats:
        """From values (B, T, width)."""
        magnitudes = values.float().abs()
        strongest = magnitudes.mean(0).topk(min(TOKENS, values.shape[1]), 0)
        return cls(magnitudes.mean(1).mean(0), strongest.indices, strongest.values)

    def cpu(self) -> NeuronStats:
        """On the CPU, with one wait for the device; positions of tokens are exact in float32."""
        rows = torch.cat([self.activations[None], self.tokens.float(), self.strongest]).cpu()
        return NeuronStats(rows[0], rows[1 : 1 + len(self.tokens)].long(), rows[1 + len(self.tokens) :])


def holdings(
    outcome: Outcome, seen: Mapping[str, NeuronStats], z: Mapping[str, torch.Tensor], statistics: NeuronStatistics
) -> list[dict[str, Any]]:
    """A record of each neuron that the search kept, as plain values.

    "deviations" is |z|, "activation" the prompt's and "usual" that of ordinary captions; "tokens" are pairs of a
    position in the text that the network reads, from 0, and its magnitude. With this neuron free and the rest of the
    set blocked, predictions were like the unblocked ones by "alone" at least, where the search wanted less than
    "limit"; neither is there where it decided without asking.

    Args:
        seen, z: address -> the site's values and (width,) |z|.
    """
    asked = {name: score for name, score, dropped in outcome.tests if not dropped}
    records = []
    for address, indices in outcome.neurons.items():
        values, usual = seen[address].cpu(), statistics.means[address]
        for index in sorted(set(indices)):
            record: dict[str, Any] = {"address": address, "index": index, "deviations": float(z[address][index])}
            record |= {"activation": float(values.activations[index]), "usual": float(usual[index])}
            pairs = zip(values.tokens[:, index].tolist(), values.strongest[:, index].tolist(), strict=True)
            record["tokens"] = [list(pair) for pair in pairs]
            if (alone := asked.get(f"{address} #{index}")) is not None:
                record |= {"alone": alone, "limit": outcome.threshold}
            records.append(record)
    return records


def held_by(neurons: NeuronSet) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """(address, index) -> a record of each search that kept the neuron, with its prompt; also of sets that were merged.

    Neurons of imported lists have none.
    """
    table: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for info in _searches(neurons.info):
        prompt = {"prompt": info["prompt"]} if "prompt" in info else {}
        for record in info["held"]:
            table.setdefault((record["address"], record["index"]), []).append(prompt | record)
    return table


def _searches(info: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The reports of single searches inside what is said of a set."""
    if "held" in info:
        yield info
    for part in info.get("merged", ()):
        yield from _searches(part)


def heat_map(neurons: NeuronSet, widths: Mapping[str, int], cell: int = 8, columns: int = 64) -> torch.Tensor:
    """(H, W, 3) in [0, 1]: a band for each layer, a cell for each neuron; those in the set are bright.

    Args:
        widths: address -> number of neurons, in the order of the bands.
        cell: side of a cell in pixels.
        columns: cells in a row; wider layers wrap.
    """
    bands = []
    for address, width in widths.items():
        rows = -(-width // columns)
        band = torch.tensor(DARK).expand(rows * columns, 3).clone()
        band[width:] = 0
        for index in neurons.neurons.get(address, ()):
            band[index] = torch.tensor(BRIGHT)
        picture = band.view(rows, columns, 3).repeat_interleave(cell, 0).repeat_interleave(cell, 1)
        bands += [picture, torch.zeros(cell, columns * cell, 3)]
    return torch.cat(bands[:-1])
