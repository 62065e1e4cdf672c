"""Blocking beside its alternatives on the planted pictures: the paper's Table 1, and what an attacker can undo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engine.condition import Condition
from ...engine.nemo.find import Result, make_probe
from ...engine.nemo.neurons import NeuronSet
from ...engine.nemo.verify import verify
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .baselines import adjusted_embedding, attention_scaling, random_neurons, random_tokens, without_padding
from .world import ORDINARY, PAPER, SEARCH, SHAPE, World, captions, setting

SEEDS = tuple(range(100, 110))
COPY = 0.05
"""Pixel RMS to the planted picture below which a sample counts as a copy; untouched ones have 0.02 to 0.035."""
Sampler = Callable[[], torch.Tensor]


@claim(
    "nemo.blocking",
    paper=PAPER,
    figure="Table 1: blocked samples leave the memorized picture, random neurons change nothing",
    target=">= 75 % of the planted pictures as far away as without their rare words (within one MAD over captions)",
)
def blocking(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Distance of samples to the planted picture, their diversity and prompt agreement, for each remedy."""
    world = setting(model, progress)
    chosen, results, sets = _found(world, progress)
    rows = [_measure(world, plant, neurons) for plant, neurons in zip(chosen, sets, strict=True)]
    far = [{name: v["RMS"] for name, v in row.items()} for row in rows]
    # Median and MAD over captions, as in the paper's tables
    mad = _median_mad([v["control"] for v in far])[1]
    cured = sum(v["NeMo"] >= v["control"] - mad for v in far)
    way = torch.tensor([(v["NeMo"] - v["untouched"]) / (v["control"] - v["untouched"]) for v in far])
    layers: dict[str, int] = {}
    for neurons in sets:
        for address, found in neurons.neurons.items():
            layers[address] = layers.get(address, 0) + len(found)
    return ClaimResult(
        value=round(cured / len(chosen), 3),
        interval=None,
        holds=cured >= 0.75 * len(chosen),
        details={
            "table, median (MAD) over pictures": _table(rows),
            "way to the control's distance [least, median]": [round(float(v), 3) for v in (way.min(), way.median())],
            "neurons by picture": {p.name: len(s) for p, s in zip(chosen, sets, strict=True)},
            "verdicts": [r.verdict for r in results],
            "neurons by layer, all pictures": layers,
            **_harm(world, sets),
        },
    )


def _found(world: World, progress: Progress) -> tuple[list[Any], list[Result], list[NeuronSet]]:
    from ...engine.portraits import plants

    chosen = [p for p in plants() if p.kind == "verbatim"]
    results = world.find([p.captions[0] for p in chosen], progress=progress)
    return chosen, results, [world.neurons(r) for r in results]


def _measure(world: World, plant: Any, neurons: NeuronSet) -> dict[str, dict[str, float]]:
    """remedy -> RMS to the planted picture (median of ten seeds), pairwise RMS, agreement with the caption."""
    from ...engine.portraits import render
    from ...engine.portraits.readout import attribute_accuracy, load_readout, read

    picture, scenes = render(plant.scenes).images, plant.scenes[[0] * len(SEEDS)]
    net, found = load_readout(), {}
    for name, sample in _remedies(world, plant, neurons).items():
        images = sample()
        accuracy = attribute_accuracy(read(net, images), scenes)
        found[name] = {
            "RMS": float((images - picture).square().mean((1, 2, 3)).sqrt().median()),
            "diversity": diversity(images),
            "agreement": float(torch.tensor(list(accuracy.values())).nanmean()),  # a hat hides the hair: not asked
        }
    return found


def _remedies(world: World, plant: Any, neurons: NeuronSet) -> dict[str, Sampler]:
    """Ways to sample the planted caption at ten seeds, the published alternatives among them."""
    prompt, n = plant.captions[0], len(SEEDS)
    words = sorted({w for c in captions(ORDINARY, 200) for w in c.split()})
    unet = world.model.unet

    def plain(text: str, blocked: NeuronSet | None = None) -> Sampler:
        return lambda: world.sample([text] * n, SEEDS, blocked)

    def tokens(count: int) -> Sampler:
        return lambda: world.sample([random_tokens(prompt, words, count, s) for s in SEEDS], SEEDS)

    def adjusted() -> torch.Tensor:
        cond, empty = world.conditions([prompt, ""])
        moved = adjusted_embedding(world.denoiser, cond, empty, _noise(), target=_usual_pull(world), steps=50)
        assert moved.text is not None
        return world.sample(moved.text.expand(n, -1, -1), SEEDS)

    def scaled() -> torch.Tensor:
        length = len(world.model.tokenizer(prompt).input_ids)
        (cond,) = world.conditions([prompt])
        text = without_padding(cond, length).text
        assert text is not None
        # The sampler puts the conditional rows first
        with attention_scaling(unet, rows=torch.arange(2 * n) < n):
            return world.sample(text.expand(n, -1, -1), SEEDS)

    return {
        "untouched": plain(prompt),
        "NeMo": plain(prompt, neurons),
        "random neurons": plain(prompt, random_neurons(unet, neurons)),
        "1 random token": tokens(1),
        "4 random tokens": tokens(4),
        "10 random tokens": tokens(10),
        "prompt embedding adjustment": adjusted,
        "attention scaling": scaled,
        "control": plain(plant.controls[0]),
    }


def _noise() -> torch.Tensor:
    return torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(0))


def _usual_pull(world: World, count: int = 32) -> float:
    """||eps_c - eps_u|| of ordinary captions at the first step: what Wen's target stands for, at this size."""
    conds, (empty,) = world.conditions(captions(ORDINARY, count)), world.conditions([""])
    rows = torch.zeros(count, dtype=torch.long)
    noise = _noise()[:1].expand(count, *SHAPE)
    with torch.no_grad():
        told, untold = (world.denoiser.predict(noise, 981.0, c).eps for c in (Condition.batch(conds), empty.take(rows)))
    return float((told - untold).flatten(1).norm(dim=1).median())


def _table(rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, str]]:
    """remedy -> measure -> "median (MAD)" over pictures, and how many pictures are still copied."""
    table = {}
    for name in rows[0]:
        line = {}
        for measure in rows[0][name]:
            middle, mad = _median_mad([row[name][measure] for row in rows])
            line[measure] = f"{middle:.3f} ({mad:.3f})"
        table[name] = line | {"copied": f"{sum(row[name]['RMS'] < COPY for row in rows)} of {len(rows)}"}
    return table


def _median_mad(values: Sequence[float]) -> tuple[float, float]:
    level = torch.tensor(list(values), dtype=torch.float64)
    middle = level.quantile(0.5)
    return float(middle), float((level - middle).abs().quantile(0.5))


def _harm(world: World, sets: Sequence[NeuronSet]) -> dict[str, Any]:
    """What blocking does to 200 ordinary captions, 25 under each of the eight sets."""
    from ...engine.portraits import render, sample_scenes
    from ...engine.portraits.readout import attribute_accuracy, load_readout, read
    from ..metrics import frechet_distance

    net, scenes = load_readout(), sample_scenes(range(ORDINARY, ORDINARY + 200))
    prompts, seeds, each = captions(ORDINARY, 200), list(range(200)), -(-200 // len(sets))
    plain = read(net, world.sample(prompts, seeds))
    parts = [slice(i * each, (i + 1) * each) for i in range(len(sets))]
    images = [world.sample(prompts[p], seeds[p], s) for p, s in zip(parts, sets, strict=True)]
    blocked = read(net, torch.cat(images))
    real = read(net, render(sample_scenes(range(ORDINARY + 200, ORDINARY + 1200))).images)

    def agreement(reading: Any) -> float:
        found = attribute_accuracy(reading, scenes)
        return round(sum(found.values()) / len(found), 4)

    return {
        "ordinary captions, prompt agreement [untouched, blocked]": [agreement(plain), agreement(blocked)],
        "ordinary captions, Frechet distance [untouched, blocked]": [
            round(frechet_distance(r.features, real.features), 2) for r in (plain, blocked)
        ],
    }


@claim(
    "nemo.verify",
    paper="Finding Dori (2025), on NeMo (Hintersdorf et al., NeurIPS 2024)",
    figure="blocked pictures come back under an optimised text embedding (memorization rate 0.20 -> 0.99)",
    target="other seeds cured for >= 75 % of the pictures; how many come back under attack is reported, not hidden",
)
def verification(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Seeds the search never saw, then 50 Adam steps on the embedding against the planted picture itself."""
    from ...engine.portraits import render

    world = setting(model, progress)
    chosen, _, sets = _found(world, progress)
    probe = make_probe(world.denoiser, config=SEARCH)
    rows: dict[str, dict[str, Any]] = {}
    for plant, neurons in zip(chosen, sets, strict=True):
        picture = render(plant.scenes).images
        with torch.no_grad():
            latents = world.model.vae.encode(picture * 2 - 1).latent_dist.mean * world.model.vae.config.scaling_factor
        (cond,) = world.conditions(plant.captions[:1])
        done = verify(probe, cond, neurons, SHAPE, world.tau, reference=latents)
        assert done.embedding is not None and done.embedding.text is not None
        images = world.sample(done.embedding.text.expand(len(SEEDS), -1, -1), SEEDS, neurons)
        away = (images - picture).square().mean((1, 2, 3)).sqrt()
        rows[plant.name] = {
            "cross-seed score [untouched, blocked]": [round(s.value, 3) for s in (done.untouched, done.blocked)],
            "RMS under attack, median": round(float(away.median()), 3),
        }
    scores = [row["cross-seed score [untouched, blocked]"] for row in rows.values()]
    cured = sum(now <= world.tau < was for was, now in scores)
    back = sum(row["RMS under attack, median"] < COPY for row in rows.values())
    return ClaimResult(
        value=round(cured / len(rows), 3),
        interval=None,
        holds=cured >= 0.75 * len(rows),
        details={"come back under attack": f"{back} of {len(rows)}", "tau": round(world.tau, 3), "by picture": rows},
    )


def diversity(images: torch.Tensor) -> float:
    """Mean pixel RMS of all pairs of N pictures."""
    flat = images.flatten(1)
    return float(torch.pdist(flat).mean() / flat.shape[1] ** 0.5)
