"""Pictures of what NEMO found, and its section of the demo report."""

from __future__ import annotations

from typing import Any

import torch

from ..progress import Progress, silent
from .neurons import NeuronSet

_DARK, _BRIGHT = (0.16, 0.18, 0.22), (1.0, 0.78, 0.24)


def heat_map(neurons: NeuronSet, widths: dict[str, int], cell: int = 8, columns: int = 64) -> torch.Tensor:
    """(H, W, 3) in [0, 1]: a band for each layer, a cell for each neuron, found ones bright.

    Layers wider than ``columns`` neurons wrap into several rows of cells.
    """
    bands = []
    for address, width in widths.items():
        rows = -(-width // columns)
        band = torch.tensor(_DARK).expand(rows * columns, 3).clone()
        band[width:] = 0
        for index in neurons.neurons.get(address, ()):
            band[index] = torch.tensor(_BRIGHT)
        picture = band.view(rows, columns, 3).repeat_interleave(cell, 0).repeat_interleave(cell, 1)
        bands += [picture, torch.zeros(cell, columns * cell, 3)]
    return torch.cat(bands[:-1])


def section(report: Any, progress: Progress = silent) -> None:
    """Four planted prompts before and after blocking, a control caption beside them, and the neurons found."""
    from PIL import Image

    from ..portraits import plants, render
    from ..portraits.report import to_pil
    from .claims import STEPS, setting

    world = setting(progress=progress)
    chosen = [p for p in plants() if p.kind == "verbatim"][:4]
    results = world.find([p.captions[0] for p in chosen])
    report.add_heading("NEMO: neurons that memorize, found and blocked")
    report.add_paragraph(
        "Each row: a planted picture, a sample of its caption, the same sample with the found neurons blocked, and a "
        "sample of the caption without its two rare words. What remains after blocking is what the caption says."
    )
    rows = []
    for plant, result in zip(chosen, results, strict=True):
        neurons = world.neurons(result)
        prompt, control = plant.captions[0], plant.controls[0]
        pictures = [render(plant.scenes).images, world.sample([prompt], [5]), world.sample([prompt], [5], neurons)]
        images = to_pil(torch.cat([*pictures, world.sample([control], [5])]))
        words = (f"planted: {plant.name}", "sample", f"{len(neurons)} neurons blocked", "without the rare words")
        rows += list(zip(images, words, strict=True))
    report.add_images(rows, width=100)
    found = heat_map(world.neurons(results[0]), world.widths())
    picture = Image.fromarray((found * 255).round().byte().numpy())
    report.add_images([(picture, f"neurons of '{chosen[0].name}': one band a layer")], width=512)
    report.add_paragraph(f"Sampled with {STEPS} DDIM steps, guidance 3. Measured: vitrine reproduce 'nemo.*'.")
