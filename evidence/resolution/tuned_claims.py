"""The claim about fine-tuning at the size: ``vitrine reproduce resolution.tuned``."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...engine.portraits.flow import load_flow_portraits
from ...engine.portraits.scenes import sample_scenes
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..portraits.classifier import load_classifier
from ..registry import ClaimResult, claim
from . import positions
from .heads import head_counter
from .looks import line
from .tuned import TuneConfig, tune

SIZES, SEEDS, MODE = ((256, 256), (320, 192)), (0, 1, 2), "rope_yarn"


@claim(
    "resolution.tuned", paper="YaRN's positions with a short fine-tune at the size (arXiv 2309.00071)",
    figure="flow portraits of 128 px with a LoRA trained at 256 px, sampled at 256 x 256 and 320 x 192",
    target="at 256 x 256 it shows more of the prompt than the same positions untrained, under each of three seeds "
    "(95 % intervals of the paired difference above 0)",
    minutes=7, quick_minutes=0.3,
)  # fmt: skip
def fine_tuned(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Prompts, noise and measures of ``resolution.positions``; includes the training.

    ``model`` may be a folder of the recipe ``tune``, which is trained to the end and measured. ``quick``
    samples 8 prompts of a folder; without one it trains 4 updates of one seed and samples 3 of one
    size. It only tests that at most a quarter of the prompt is lost.
    """
    settings = TuneConfig(MODE, steps=4, pictures=8) if quick and not model else TuneConfig(MODE)
    count = positions.PROMPTS if not quick else 8 if model else 3
    sizes = SIZES[:1] if quick and not model else SIZES
    seeds = SEEDS[:1] if quick and not model else SEEDS
    net, flow = load_classifier(), load_flow_portraits()
    heads = head_counter(net, 40 if quick else 120)
    scenes = sample_scenes(range(positions.FIRST, positions.FIRST + count))
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[str, tuple[Any, str]] = {positions.ENLARGED: (flow, positions.ENLARGED), MODE: (flow, MODE)}
        for seed in seeds:
            trained = tune(Path(model or scratch), replace(settings, seed=seed), progress=silent)
            models[f"{MODE}, {settings.steps} updates, seed {seed}"] = (trained, MODE)
            progress(seed + 1, len(seeds) + len(sizes) * (len(seeds) + 2), None)
    looks: dict[tuple[int, int], dict[str, positions.Look]] = {size: {} for size in sizes}
    for k, (size, name) in enumerate((size, name) for size in sizes for name in models):
        drawn = positions.draw(models[name][0], models[name][1], size, scenes, silent)
        looks[size][name] = positions.judge(net, heads, drawn, scenes)
        print(f"{size[0]} x {size[1]}, {name}: {line(looks[size][name])}", flush=True)
        progress(len(seeds) + k + 1, len(seeds) + len(sizes) * len(models), None)
    return judged(looks, quick)


def judged(looks: dict[tuple[int, int], dict[str, positions.Look]], quick: bool = False) -> ClaimResult:
    """The result from each arm at each size; the value is the mean fraction of the trained models' images."""
    square = looks[SIZES[0]]
    trained = [look for name, look in square.items() if name not in (positions.ENLARGED, MODE)]
    gains = [mean_interval(look.hits - square[MODE].hits) for look in trained]
    details: dict[str, Any] = {"gain over untrained by seed, 95 %": [[round(v, 3) for v in span] for span in gains]}
    details |= {f"{w} x {h}": {name: line(look) for name, look in rows.items()} for (w, h), rows in looks.items()}
    each = torch.stack([look.hits for look in trained]).mean(0)
    low, high = mean_interval(each)
    holds = all(low > (-0.25 if quick else 0) for low, _ in gains)
    mean = {name: square[name] for name in (positions.ENLARGED, MODE)} | {"fine-tuned": replace(trained[0], hits=each)}
    roles = {arm.name: arm for arm in positions.shown_arms(mean, "fine-tuned")}
    return ClaimResult(
        round(float(each.mean()), 3), (round(low, 3), round(high, 3)), holds, details, n=len(each), seeds=len(trained),
        arms=tuple(replace(arm, role="trivial") if name == MODE else arm for name, arm in roles.items()),
        tables=(positions.head_table(looks),),
    )  # fmt: skip
