"""Claims about W2W on the people of the portraits world: ``vitrine reproduce w2w.*``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...engine.progress import Progress, silent
from ..registry import ClaimResult, Curves, claim
from .world import LABELS, PAPER, SHAPES

MODELS, PICTURES = 50, 6
PER_LABEL, SHOTS = 40, 3
INVERTED = 8
FRESH = 5000
"""People from here on (after the first identity) are in no space."""


@claim(
    "w2w.sampling", paper=PAPER, figure="section 4.2: sampled models are consistent, new, and vary as the training set",
    target="95 % of within below 95 % of between; none nearer to a training model than 95 % of these to each other; "
    "attribute shares within 10 points of the training set's",
)  # fmt: skip
def sampling(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """50 sampled models, 6 pictures each, in the same contexts."""
    from ...engine.w2w.sampling import SampleConfig, closeness, nearest, sample
    from .measures import PEOPLE, distances, distributions, shares
    from .world import Studio, labels

    studio = Studio.open(model)
    space = studio.space
    rows = sample(space, range(MODELS), PEOPLE)
    features, attributes = studio.read(studio.draw(rows, PICTURES))
    within, between = distances(features)
    limit = closeness(space)
    near = [n[0].cosine for n in nearest(space, rows)]
    known = labels(space.names)
    wanted = {k: float(known[k].nanmean()) for k in LABELS}
    # a finite training set's own shares, through the same network: what its LoRAs draw
    drawn = studio.read(studio.draw(space.coefficients[:: max(1, space.count // MODELS)][:MODELS], PICTURES))[1]
    more = sample(space, range(MODELS, 3 * MODELS), PEOPLE)
    many = studio.read(studio.draw(more, 3))[1]  # shares of 50 models would be 7 points uncertain
    both = {k: torch.cat([v.mean(1, keepdim=True), many[k].mean(1, keepdim=True)]) for k, v in attributes.items()}
    found, trained = shares(studio, both), shares(studio, drawn)
    gaps = {k: round(found[k] - wanted[k], 3) for k in LABELS}
    consistent = int((within[:, None] < between).all(1).sum())
    gaussian = studio.draw(sample(space, range(MODELS), SampleConfig(components=space.dimension)), PICTURES)
    theirs, apart = distances(studio.read(gaussian)[0])
    worst = max(gaps, key=lambda k: abs(gaps[k]))
    apart_enough = float(torch.quantile(within, 0.95)) < float(torch.quantile(between, 0.05))
    holds = apart_enough and max(near) < limit and abs(gaps[worst]) <= 0.10
    details = {
        "distance within a model": _spread(within),
        "distance between models": _spread(between.flatten()),
        "models closer to themselves than to any other": f"{consistent} of {MODELS}",
        "independent Gaussians (the paper's draw)": f"within {_spread(theirs)}, between {float(apart.median()):.3f}, "
        f"consistent {int((theirs[:, None] < apart).all(1).sum())} of {MODELS}",
        "nearest training model, cosine": f"at most {max(near):.3f}, mean {sum(near) / len(near):.3f}",
        "training models among themselves, 95th percentile": round(limit, 3),
        "largest gap of an attribute's share": f"{worst} {gaps[worst]:+.3f}",
        "gaps": gaps,
        "training LoRAs' own gaps": {k: round(trained[k] - wanted[k], 3) for k in LABELS},
    }
    plot = Curves("Identity distance of two pictures", "cosine distance", "share below", distributions(within, between))
    return ClaimResult(round(float(within.mean() / between.mean()), 3), None, holds, details, (plot,))


@claim(
    "w2w.directions", paper=PAPER, figure="Fig. 9: linear directions in weight space tell attributes apart",
    target="held-out accuracy >= 90 % for every attribute of LABELS",
)  # fmt: skip
def directions(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Five-fold accuracy of each label's direction, and how much directions share."""
    from ...engine.w2w.directions import quality
    from .world import DIRECTION_COMPONENTS, labels, people_space

    space = people_space()
    told = quality(space, labels(space.names), components=DIRECTION_COMPONENTS)
    worst = min(LABELS, key=lambda k: told.balanced[k])
    off = told.entanglement[~torch.eye(len(told.labels), dtype=torch.bool)]
    details: dict[str, Any] = {k: f"{told.accuracy[k]:.3f} (balanced {told.balanced[k]:.3f})" for k in LABELS}
    details |= {k: f"above or below average: {told.balanced[k.replace('_', ' ')]:.3f}" for k in SHAPES}
    details["mean |cosine| between directions"] = round(float(off.mean()), 3)
    return ClaimResult(round(told.balanced[worst], 3), None, told.balanced[worst] >= 0.9, details)


@claim(
    "w2w.editing", paper=PAPER, figure="Table 1: edits against prompts and concept sliders",
    target="for 6 attributes or more: target +60 points monotonically, others <= 10 points, identity above both "
    "baselines, the prompt as it is written",
)  # fmt: skip
def editing(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Sweeps on 40 models that lack the attribute; baselines on the same models, seeds and surroundings.

    Edits and concept sliders act from the timestep in ``EDITS`` on, prompts from the first step on.
    Identity (the paper's ID), others and pixels (its LPIPS), target (its CLIP).
    """
    from ...engine.denoiser import Denoiser
    from . import measures as m
    from .world import Studio

    studio = Studio.open(model)
    denoiser = Denoiser.from_diffusers(studio.portraits.pipeline())
    sliders, start = m.baseline_sliders(studio, denoiser, progress=progress)
    details: dict[str, Any] = {}
    good, hard = list[str](), list[str]()
    for i, label in enumerate(m.WORDS):
        stand = m.EditStand.open(studio, label, PER_LABEL)
        own, prompt, slider = stand.w2w(), stand.prompt(), stand.slider(sliders[i], start)
        details[label], holds, harder = _edit_row(own, prompt, slider)
        good, hard = good + [label] * holds, hard + [label] * harder
        progress(i + 1, len(m.WORDS), None)
    details |= {"all conditions": good, "with the prompt's word weighted to the same rise": hard}
    return ClaimResult(len(good), None, len(good) >= 6, details)


def _edit_row(own: Any, prompt: Any, slider: Any) -> tuple[dict[str, Any], bool, bool]:
    """The paper's table for one attribute, whether the edit holds, and whether it does against weighted words too.

    Slider and w2w stand where the target has risen by 60 points (or as far as the shorter of them reaches), the prompt
    as it is written: it has no strength. A word may be given a weight all the same; that is the harder comparison.
    """
    rise = own.target[-1] - own.target[0]
    steady = all(b >= a - 0.01 for a, b in zip(own.target, own.target[1:], strict=False))
    common = max(0.05, min(0.6, rise, max(slider.target) - slider.target[0]))
    mine, ours, theirs, weighted = own.at(0.6), own.at(common), slider.at(common), prompt.at(common)
    written = prompt.identity[-1], prompt.others[-1], prompt.pixels[-1]
    better = ours is not None and ours[0] > written[0] and (theirs is None or ours[0] > theirs[0])
    harder = better and (weighted is None or ours[0] > weighted[0])
    rows = {
        "w2w": (ours, common), "prompt": (written, prompt.target[-1] - prompt.target[0]),
        "slider": (theirs, common), "prompt, weighted": (weighted, common),
    }  # fmt: skip
    table = {name: "-" if row is None else _measured(row, gain) for name, (row, gain) in rows.items()}
    others = "-" if mine is None else f"{mine[1]:.3f} (most: {own.other})"
    told = {"target by strength": [round(v, 3) for v in own.target], "others at +60": others} | table
    steady = steady and mine is not None and mine[1] <= 0.10
    return told, steady and better, steady and harder


def _measured(row: tuple[float, float, float], gain: float) -> str:
    identity, others, pixels = row
    return f"identity {identity:.3f}, others {others:.3f}, pixels {pixels:.3f}, target +{gain:.0%}"


@claim(
    "w2w.delayed", paper=PAPER, figure="Fig. 31: edits that begin later keep the picture and do less",
    target="attribute change and picture change both fall as the edit begins later; order of 3 edits <= 1e-6",
)  # fmt: skip
def delayed(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Three edits at once on 10 models, injected from several timesteps on."""
    from ...engine.w2w.editing import edit
    from .measures import subjects_without
    from .world import Studio

    studio = Studio.open(model)
    rows = subjects_without(studio, "glasses", 10)
    steps = {"glasses": 2.5, "dark skin": 2.5, "bald": 2.0}
    after = edit(studio.space, rows, steps)
    turned = rows
    for label in reversed(steps):
        turned = edit(studio.space, turned, {label: steps[label]})
    flat, other = studio.flat(after)[0], studio.flat(turned)[0]
    order = float((flat - other).abs().max())
    plain = studio.draw(rows, SHOTS)
    table, gains, moves = {}, list[float](), list[float]()
    for start in (1000, 900, 800, 700, 600, 400, 200, -1):
        images = studio.draw(rows, SHOTS, late=after, start=float(start))
        attributes = studio.read(images)[1]
        gains.append(sum(float(studio.likelihood(attributes, k).mean()) for k in steps) / len(steps))
        moves.append(float((images - plain).square().mean().sqrt()))
        table[f"from t = {start}"] = f"attributes {gains[-1]:.3f}, picture moved by {moves[-1]:.4f}"
        progress(len(gains), 8, None)
    falls = all(b <= a + 0.02 for a, b in zip(gains, gains[1:], strict=False))
    falls = falls and all(b <= a + 1e-3 for a, b in zip(moves, moves[1:], strict=False)) and moves[-1] == 0
    line = {"start 1000 (right) to never (left)": list(zip(moves, gains, strict=True))}
    plot = Curves("Edits that begin later", "RMS change of the picture", "attributes", line)
    return ClaimResult(order, None, falls and order <= 1e-6, table, (plot,))


@claim(
    "w2w.inversion", paper=PAPER, figure="Table 2: one picture against trained LoRAs; Figs. 10 and 30: trends",
    target="identity >= 90 % of a LoRA trained on 20 pictures, above a LoRA trained on the one picture",
)  # fmt: skip
def inversion(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """8 people of no space: inversion, LoRA on 20 pictures, LoRA on one; then fewer components, and other styles.

    Judged with one prompt for every picture, as in the paper ("sks person"). Beside it, prompts that say what stands
    around the person, which the portraits world alone can give; there one picture is enough for a LoRA too.
    """
    from ...engine.denoiser import Denoiser
    from ...engine.portraits.identities import FIRST_IDENTITY
    from . import measures as m
    from .world import Studio

    studio = Studio.open(model)
    denoiser, who = Denoiser.from_diffusers(studio.portraits.pipeline()), []
    who = [FIRST_IDENTITY + FRESH + i for i in range(INVERTED)]
    images, told, _ = m.pictures_of(who)
    details: dict[str, Any] = {}
    judged: dict[str, m.Likeness] = {}
    for i, (protocol, prompt) in enumerate((("one prompt for all", m.BARE), ("surroundings in the prompt", None))):
        found = _three_ways(studio, denoiser, images, told, who, prompt)
        details[protocol] = {
            name: f"identity {v.mean:.3f}, {v.numbers} numbers, {v.seconds:.1f} s a person" for name, v in found.items()
        }
        judged = judged or found
        progress(i + 1, 4, None)
    nobody = studio.flat(torch.zeros(len(who), studio.space.dimension))[0]
    details["the mean model"] = round(float(m.likeness(studio, nobody, who).mean()), 3)
    parts = _by_components(studio, denoiser, images, told, who)
    parts[studio.space.dimension] = round(found["inversion, 1 picture"].mean, 3)
    details["by number of components"] = {str(k): v for k, v in parts.items()}
    progress(3, 4, None)
    details["another drawing style (gray, inked edges)"] = _other_style(studio, denoiser, images, told, who)
    ours, many, one = judged.values()
    holds = ours.mean >= 0.9 * many.mean and ours.mean > one.mean
    lines = {"inversion of one picture": _logarithmic(parts)}
    lines["LoRA of 20 pictures"] = [(x, found["LoRA, 20 pictures"].mean) for x, _ in lines["inversion of one picture"]]
    plot = Curves("Inversion by number of components", "components, log10", "identity", lines)
    return ClaimResult(round(ours.mean / many.mean, 3), None, holds, details, (plot,))


def _three_ways(
    studio: Any, denoiser: Any, images: Any, told: list[str], who: list[int], prompt: str | None
) -> dict[str, Any]:
    """Inversion, LoRA on 20 pictures, LoRA on one; ``prompt`` for all pictures, or each its own."""
    from . import measures as m

    rows, seconds = m.inverted(studio, denoiser, images, told if prompt is None else [prompt] * len(who))
    ours = m.Likeness(m.likeness(studio, studio.flat(rows)[0], who), studio.space.dimension, seconds)
    many, one = (
        m.Likeness(m.likeness(studio, weights, who), weights.shape[1], spent)
        for weights, spent in (m.trained(studio, denoiser, who, n, prompt) for n in (20, 1))
    )
    return {"inversion, 1 picture": ours, "LoRA, 20 pictures": many, "LoRA, 1 picture": one}


def _by_components(studio: Any, denoiser: Any, images: Any, told: list[str], who: list[int]) -> dict[int, float]:
    from . import measures as m

    found = {}
    for count in (10, 30, 100):
        rows, _ = m.inverted(studio, denoiser, images, told, replace(m.INVERSION, components=count))
        found[count] = round(float(m.likeness(studio, studio.flat(rows)[0], who).mean()), 3)
    return found


def _other_style(studio: Any, denoiser: Any, images: Any, told: list[str], who: list[int]) -> dict[str, Any]:
    """Gray pictures with inked edges: does inversion still land on a person, and on this one."""
    from ...engine.w2w.sampling import nearest
    from . import measures as m

    gray = images.mean(1, keepdim=True)
    edges = (gray - torch.nn.functional.avg_pool2d(gray, 3, 1, 1)).abs().clamp(max=0.15) * 4
    drawn = (gray - edges).clamp(0, 1).expand(-1, 3, -1, -1)
    rows, _ = m.inverted(studio, denoiser, drawn, told, replace(m.INVERSION, prior=0.1))
    length = (rows / studio.space.deviations).square().mean(1).sqrt()
    usual = (studio.space.coefficients / studio.space.deviations).square().mean(1).sqrt()
    features, _ = studio.read(studio.draw(rows, 6))
    within, between = m.distances(features)
    return {
        "identity": round(float(m.likeness(studio, studio.flat(rows)[0], who).mean()), 3),
        "deviations from the mean": f"{float(length.mean()):.2f} (training models {float(usual.mean()):.2f})",
        "distance within / between": f"{float(within.mean()):.3f} / {float(between.mean()):.3f}",
        "nearest training model, cosine": round(sum(n[0].cosine for n in nearest(studio.space, rows)) / len(rows), 3),
    }


@claim(
    "w2w.models", paper=PAPER, figure="Figs. 9 and 10: more training models make better spaces",
    target="identity of inversions rises, entanglement falls, with the number of models",
)  # fmt: skip
def models(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Spaces of the first 32, 128 and all people, from the shipped coefficients' own weights."""
    from ...engine.denoiser import Denoiser
    from ...engine.portraits.identities import FIRST_IDENTITY
    from ...engine.w2w.directions import quality
    from . import measures as m
    from .world import Studio, labels, people_space, subspace

    studio, whole = Studio.open(model), people_space()
    denoiser = Denoiser.from_diffusers(studio.portraits.pipeline())
    who = [FIRST_IDENTITY + FRESH + i for i in range(INVERTED)]
    images, told, _ = m.pictures_of(who)
    table, trend, counts = {}, [], (32, 128, whole.count)
    for i, count in enumerate(counts):
        space = subspace(whole, count)
        rows, _ = m.inverted(studio, denoiser, images, told, space=space)
        score = float(m.likeness(studio, space.decode(rows), who).mean())
        known = {k: v for k, v in labels(space.names).items() if k in m.WORDS}
        shared = quality(space, known).entanglement[~torch.eye(len(known), dtype=torch.bool)].mean()
        table[f"{count} models"] = f"identity {score:.3f}, mean |cosine| of directions {float(shared):.3f}"
        trend.append((score, float(shared)))
        progress(i + 1, 3, None)
    names = ("identity of inversions", "mean |cosine| of directions")
    lines = {name: _logarithmic(dict(zip(counts, [t[j] for t in trend], strict=True))) for j, name in enumerate(names)}
    plot = Curves("Spaces of more models", "models, log10", "", lines)
    rises = trend[0][0] < trend[1][0] < trend[2][0] and trend[0][1] > trend[1][1] > trend[2][1]
    return ClaimResult(round(trend[-1][0] - trend[0][0], 3), None, rises, table, (plot,))


def _logarithmic(points: dict[int, float]) -> list[tuple[float, float]]:
    return [(math.log10(x), y) for x, y in points.items()]


def _spread(values: torch.Tensor) -> str:
    low, middle, high = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95])).tolist()
    return f"{middle:.3f} (5th to 95th percentile {low:.3f} to {high:.3f})"
