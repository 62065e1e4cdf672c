"""Blocking and its alternatives on the memorized pictures: the paper's Table 1, and what it does to other captions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engine.nemo.adjust import adjusted_embedding, usual_pull
from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.find import Result
from ...engine.nemo.neurons import NeuronSet
from ...engine.runtime.progress import Progress, silent
from ..metrics import copy_figures, frechet_distance
from ..portraits.avataaars import avataaars_folder
from ..registry import ClaimResult, Table, arms, claim
from .baselines import (
    attention_scaling,
    random_neurons,
    random_tokens,
    without_padding,
)
from .probed_model import ORDINARY, PAPER, ProbedModel, SampleBudget, budget_of, captions, setting, verbatim

SEEDS = tuple(range(100, 110))
COPY = 0.05
"""Pixel RMS to the memorized picture below which a sample counts as a copy; untouched ones have 0.02 to 0.035."""
CONTROL = "without the rare words"
"""The memorized caption without them, sampled as it is."""
Sampler = Callable[[], torch.Tensor]
Figures = dict[str, dict[str, float]]
"""Remedy -> measure -> figure."""


ROLES = {
    "NeMo": "ours",
    "NeMo, published stopping rule": "rival",
    "10 random tokens": "rival",
    "4 random tokens": "rival",
    "prompt embedding adjustment": "rival",
    "attention scaling": "rival",
    "random neurons": "trivial",
    "untouched": "trivial",
    CONTROL: "reference",
}


@claim(
    "nemo.blocking",
    paper=PAPER,
    figure="Table 1: blocked samples leave the memorized picture, random neurons change nothing",
    target=">= 75 % of the memorized pictures as far away as without their rare words (within one MAD over captions)",
    minutes=5,
    quick_minutes=0.5,
)
def blocking(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Distance of samples to the memorized picture, their diversity and prompt agreement, for each remedy."""
    budget = budget_of(quick)
    probed = setting(model, progress, budget)
    plants, results, sets = search_memorized(probed, progress, budget)
    published = [probed.neurons(r) for r in probed.find([p.captions[0] for p in plants], protocol="nemo")]
    measured = [_measure(probed, *each, budget) for each in zip(plants, sets, published, strict=True)]
    tables, copies = [table for table, _ in measured], [figures for _, figures in measured]
    far = [{name: figures["RMS"] for name, figures in table.items()} for table in tables]
    # Median and MAD over captions, as in the paper's tables
    mad = _median_mad([v[CONTROL] for v in far])[1]
    cured = sum(v["NeMo"] >= v[CONTROL] - mad for v in far)
    way = torch.tensor([(v["NeMo"] - v["untouched"]) / (v[CONTROL] - v["untouched"]) for v in far])
    layers: dict[str, int] = {}
    for neurons in sets:
        for address, indices in neurons.neurons.items():
            layers[address] = layers.get(address, 0) + len(indices)
    interval = share_interval(cured, len(plants)) if quick else None
    summary = _with_copied(_summary(tables), tables)
    single = tuple((name, row["copied by a single sample"]) for name, row in summary.items())
    return ClaimResult(
        value=round(cured / len(plants), 3),
        interval=interval,
        holds=(interval[1] if interval else cured / len(plants)) >= 0.75,
        details={
            "table, median (MAD) over pictures": summary,
            "way to the control's distance [least, median]": [round(float(v), 3) for v in (way.min(), way.median())],
            "neurons by picture": {p.name: len(s) for p, s in zip(plants, sets, strict=True)},
            "... with the published stopping rule": {p.name: len(s) for p, s in zip(plants, published, strict=True)},
            "verdicts": [r.verdict for r in results],
            "neurons by layer, all pictures": layers,
            **_harm(probed, sets, budget),
            "cosines of the readout's features, median (MAD) over pictures": _summary(copies),
        },
        arms=arms({name: sum(table[name]["RMS"] < COPY for table in tables) for name in tables[0]}, ROLES),
        n=len(plants),
        seeds=budget.seeds,
        tables=(Table("Copied by a single sample", ("remedy", "pictures"), single),),
    )


@claim(
    "nemo.blocking.avataaars",
    paper=PAPER,
    figure="nemo.blocking on faces of DiceBear's Avataaars",
    target=">= 75 % of the memorized pictures as far away as without their rare words (within one MAD over captions)",
    minutes=5,
    quick_minutes=1,
)
def blocking_avataaars(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As nemo.blocking; every setting was chosen on the portraits."""
    return blocking(avataaars_folder(model, avataaars), progress, quick)


def search_memorized(
    probed: ProbedModel, progress: Progress, budget: SampleBudget
) -> tuple[list[Any], list[Result], list[NeuronSet]]:
    """Memorized pictures, what the search of their captions ends with, and the neurons to block for each."""
    plants = verbatim(budget, probed.model.dataset)
    results = probed.find([p.captions[0] for p in plants], progress=progress)
    return plants, results, [probed.neurons(r) for r in results]


def _measure(
    probed: ProbedModel, plant: Any, neurons: NeuronSet, published: NeuronSet, budget: SampleBudget
) -> tuple[Figures, Figures]:
    """(RMS to the memorized picture, pairwise RMS, agreement with the caption; cosines of features), for each remedy.

    Figures of one caption are medians over its seeds.
    """
    from ..portraits.classifier import attribute_accuracy, classifier_of, read

    net, picture = classifier_of(probed.model), probed.model.draw(plant.scenes)
    table: Figures = {}
    copies: Figures = {}
    untouched = None
    for name, sample in _remedies(probed, plant, neurons, published, SEEDS[: budget.seeds]).items():
        images = sample()
        untouched = images if untouched is None else untouched
        accuracy = attribute_accuracy(read(net, images), plant.scenes[[0] * len(images)], net.dataset)
        away = (images - picture).square().mean((1, 2, 3)).sqrt()
        table[name] = {
            "RMS": float(away.median()),
            "copies": float((away < COPY).float().mean()),
            "diversity": diversity(images),
            "agreement": float(torch.tensor(list(accuracy.values())).nanmean()),  # a hat hides the hair: not asked
        }
        copies[name] = copy_figures(images, lambda x: read(net, x).features, untouched=untouched, original=picture)
    return table, copies


def _remedies(
    probed: ProbedModel, plant: Any, neurons: NeuronSet, published: NeuronSet, seeds: Sequence[int]
) -> dict[str, Sampler]:
    """Ways to sample the memorized caption, one picture a seed; the published alternatives are among them."""
    prompt, n = plant.captions[0], len(seeds)
    words = sorted({w for c in captions(ORDINARY, 200, probed.model.dataset) for w in c.split()})
    unet = probed.model.unet

    def plain(text: str, blocked: NeuronSet | None = None) -> Sampler:
        return lambda: probed.sample([text] * n, seeds, blocked)

    def tokens(count: int) -> Sampler:
        return lambda: with_tokens(probed, prompt, seeds, words, count)

    return {
        "untouched": plain(prompt),
        "NeMo": plain(prompt, neurons),
        "NeMo, published stopping rule": plain(prompt, published),
        "random neurons": plain(prompt, random_neurons(unet, neurons)),
        "1 random token": tokens(1),
        "4 random tokens": tokens(4),
        "10 random tokens": tokens(10),
        "prompt embedding adjustment": lambda: adjusted(probed, prompt, seeds),
        "attention scaling": lambda: scaled(probed, prompt, seeds),
        CONTROL: plain(plant.controls[0]),
    }


def with_tokens(
    probed: ProbedModel, prompt: str, seeds: Sequence[int], words: Sequence[str], count: int
) -> torch.Tensor:
    """Samples with random words added, other ones for each seed."""
    return probed.sample([random_tokens(prompt, words, count, s) for s in seeds], seeds)


def adjusted(
    probed: ProbedModel, prompt: str, seeds: Sequence[int], share: float = 1.0, t: float = 981.0
) -> torch.Tensor:
    """Samples of an embedding moved until guidance pulls no more than a share of what ordinary captions' does at t."""
    cond, empty = probed.conditions([prompt, ""])
    ordinary, noise = probed.conditions(captions(ORDINARY, 32, probed.model.dataset)), _noise(probed)
    target = share * usual_pull(probed.denoiser, ordinary, empty, noise[:1], t)
    moved, *_ = adjusted_embedding(probed.denoiser, cond, empty, noise, target, t)
    assert moved.text is not None
    return probed.sample(moved.text.expand(len(seeds), -1, -1), seeds)


def scaled(probed: ProbedModel, prompt: str, seeds: Sequence[int], factor: float = 1.25) -> torch.Tensor:
    """Samples with the start token louder and the padding hidden."""
    length = len(probed.model.tokenizer(prompt).input_ids)
    (cond,) = probed.conditions([prompt])
    text, n = without_padding(cond, length).text, len(seeds)
    assert text is not None
    # The sampler puts the conditional rows first
    with attention_scaling(probed.model.unet, factor, rows=torch.arange(2 * n) < n):
        return probed.sample(text.expand(n, -1, -1), seeds)


def _noise(probed: ProbedModel) -> torch.Tensor:
    return torch.randn(8, *probed.model.latent_shape, generator=torch.Generator().manual_seed(0))


def _summary(pictures: Sequence[Figures]) -> dict[str, dict[str, str]]:
    """Remedy -> measure -> "median (MAD)" over pictures."""
    table: dict[str, dict[str, str]] = {}
    for name, figures in pictures[0].items():
        spreads = {measure: _median_mad([picture[name][measure] for picture in pictures]) for measure in figures}
        table[name] = {measure: f"{middle:.3f} ({mad:.3f})" for measure, (middle, mad) in spreads.items()}
    return table


def _with_copied(table: dict[str, dict[str, str]], pictures: Sequence[Figures]) -> dict[str, dict[str, str]]:
    """The table with two further columns: how many pictures are still copied, by the median and by any sample."""

    def count(name: str, measure: str, level: float) -> str:
        return f"{sum(picture[name][measure] < level for picture in pictures)} of {len(pictures)}"

    def worst(name: str) -> str:
        fractions = [picture[name]["copies"] for picture in pictures]
        return f"{sum(s > 0 for s in fractions)} of {len(pictures)}, at most {max(fractions):.0%} of samples"

    columns = {name: {"copied": count(name, "RMS", COPY), "copied by a single sample": worst(name)} for name in table}
    return {name: line | columns[name] for name, line in table.items()}


def _median_mad(values: Sequence[float]) -> tuple[float, float]:
    level = torch.tensor(list(values), dtype=torch.float64)
    middle = level.quantile(0.5)
    return float(middle), float((level - middle).abs().quantile(0.5))


def _harm(probed: ProbedModel, sets: Sequence[NeuronSet], budget: SampleBudget) -> dict[str, Any]:
    """What blocking does to ordinary captions, as many of them under each of the sets."""
    untouched, blocked = ordinary_figures(probed, [NeuronSet({})], budget), ordinary_figures(probed, sets, budget)
    return {f"{name} [untouched, blocked]": [value, blocked[name]] for name, value in untouched.items()}


def ordinary_figures(probed: ProbedModel, sets: Sequence[NeuronSet], budget: SampleBudget) -> dict[str, float]:
    """Prompt agreement and Frechet distance of ordinary captions' samples, as many of them under each of the sets."""
    from ..portraits.classifier import attribute_accuracy, classifier_of, read

    count, dataset = budget.ordinary, probed.model.dataset
    net, scenes = classifier_of(probed.model), dataset.sample_scenes(range(ORDINARY, ORDINARY + count))
    prompts, seeds, each = captions(ORDINARY, count, dataset), list(range(count)), -(-count // len(sets))
    parts = [slice(i * each, (i + 1) * each) for i in range(len(sets))]
    images = [probed.sample(prompts[s], seeds[s], neurons) for s, neurons in zip(parts, sets, strict=True)]
    reading = read(net, torch.cat(images))
    others = dataset.sample_scenes(range(ORDINARY + 200, ORDINARY + 200 + budget.renders))
    real = read(net, probed.model.draw(others))
    accuracy = attribute_accuracy(reading, scenes, dataset)
    return {
        "ordinary captions, prompt agreement": round(sum(accuracy.values()) / len(accuracy), 4),
        "ordinary captions, Frechet distance": round(frechet_distance(reading.features, real.features), 2),
    }


def diversity(images: torch.Tensor) -> float:
    """Mean pixel RMS of all pairs of N pictures."""
    flat = images.flatten(1)
    return float(torch.pdist(flat).mean() / flat.shape[1] ** 0.5)
