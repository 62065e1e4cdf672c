"""Curves of blocked neurons, and the NEMO section of the demo page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.nemo.find import Result, make_probe
from ...engine.nemo.neuron_effects import heat_map
from ...engine.nemo.noise_similarity import Request, probe_noise
from ...engine.nemo.sites import value_activations
from ...engine.runtime.progress import Progress, silent
from ..charts import line_chart
from .baselines import random_neurons
from .probed_model import SEARCH, SHAPE, STEPS, ProbedModel, SampleBudget, setting, verbatim

if TYPE_CHECKING:
    from ...engine.io.html_page import Report


def score_curve(probed: ProbedModel, prompt: str, result: Result, points: int = 8) -> list[tuple[float, float]]:
    """(number of blocked neurons, similarity of blocked to unblocked prediction), neurons by |z| descending."""
    if result.search is None:
        return []
    (cond,), probe = probed.conditions([prompt]), make_probe(probed.denoiser, config=SEARCH)
    activations = value_activations(probed.denoiser, cond, probe.sites)
    z = {s.address: probed.statistics.z(s.address, a)[0] for s, a in zip(probe.sites, activations, strict=True)}
    order = sorted(((float(z[a][n]), a, n) for a, ns in result.search.neurons.items() for n in ns), reverse=True)
    counts = sorted({round(len(order) * i / points) for i in range(points + 1)})
    noise = probe_noise(SEARCH, SHAPE)
    requests = [Request(cond, noise, {})]
    for count in counts:
        blocked: dict[str, list[int]] = {}
        for _, address, index in order[:count]:
            blocked.setdefault(address, []).append(index)
        requests.append(Request(cond, noise, blocked))
    unblocked, *signals = probe.signals(requests)
    return [(float(n), float(probe.similarity(unblocked, s).mean())) for n, s in zip(counts, signals, strict=True)]


def section(report: Report, progress: Progress = silent) -> None:
    """Two memorized prompts before and after blocking, a control caption, and the neurons found."""
    from PIL import Image

    from ...engine.portraits import render
    from ..portraits.page import to_pil

    probed = setting(progress=progress, budget=SampleBudget(statistics=300, calibration=60))
    chosen = verbatim()[:2]
    results = probed.find([p.captions[0] for p in chosen])
    report.add_paragraph(
        "From left to right: a memorized picture, a sample of its caption, and the same sample with the found neurons "
        "blocked. Then as many random neurons blocked (the baseline), and the caption without its two rare words."
    )
    for plant, result in zip(chosen, results, strict=True):
        neurons = probed.neurons(result)
        prompt, control = plant.captions[0], plant.controls[0]
        pictures = [render(plant.scenes).images, probed.sample([prompt], [5]), probed.sample([prompt], [5], neurons)]
        pictures.append(probed.sample([prompt], [5], random_neurons(probed.model.backbone, neurons)))
        images = to_pil(torch.cat([*pictures, probed.sample([control], [5])]))
        words = (
            f"memorized: {plant.name}",
            "sample",
            f"{len(neurons)} neurons blocked",
            "random neurons",
            "without the rare words",
        )
        report.add_images(list(zip(images, words, strict=True)), width=100)
    heat = heat_map(probed.neurons(results[0]), probed.widths())
    picture = Image.fromarray((heat * 255).round().byte().numpy())
    report.add_images(
        [(picture, f"neurons of '{chosen[0].name}': one band a layer, a bright column for each blocked neuron")],
        width=512,
    )
    curves = {p.name: score_curve(probed, p.captions[0], r) for p, r in zip(chosen, results, strict=True)}
    axes = ("neurons blocked, largest |z| first", "similarity")
    report.add_images([(line_chart(curves, "Blocked prediction against the unblocked one", *axes), "")], width=560)
    report.add_paragraph(f"Sampled with {STEPS} DDIM steps, guidance 3. Measured: `vitrine reproduce 'nemo.*'`.")
