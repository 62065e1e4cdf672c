"""A picture of which neurons were found, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .neurons import NeuronSet

DARK, BRIGHT = (0.16, 0.18, 0.22), (1.0, 0.78, 0.24)


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
