"""Claims about resolution transfer on the portraits transformer: ``vitrine reproduce resolution.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...engine.errors import refuse
from ...engine.portraits.shipped import TRANSFORMERS
from ...engine.runtime.progress import Progress, silent
from ..control.controlled_transformer import ControlledTransformer
from ..intervals import mean_interval
from ..portraits.classifier import load_classifier
from ..registry import ClaimResult, arms, claim
from . import law_claims as _law  # noqa: F401  registers resolution.guidance
from . import positions, receptive
from .curves import Curves, mean_curve, read_curves, steps_to_reach
from .heads import head_counter, validation
from .looks import line
from .transfer_training import PAPER, TARGET_SIDE, Judge, TransferConfig

CURVES = TRANSFORMERS / "transfer.json"
"""Measurements of ``python -m vitrine.evidence.recipes transfer`` on the shipped models."""
SHIPPED = f"power-cosine-{TARGET_SIDE}"
QUICK_SAMPLES = 60
GRID_RESCALED, EXTRAPOLATED_RESCALED, GRID_PLAIN = "grid-rescaled", "extrapolated-rescaled", "grid-plain"


@claim(
    "resolution.transfer",
    paper=PAPER,
    figure="Fig. 8: positions resampled and schedule rescaled, 64 to 128 px",
    target="both together end lowest; they reach the FID at which the worst arm ends in at most half of its steps",
    minutes=1,
    quick_minutes=0.25,
)
def transfer(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Curves of FID by fine-tuning step, three arms, all seeds; ``model`` may be the folder of another run.

    The shipped 128-pixel model, if there is one, is sampled and measured again; ``quick`` samples fewer images,
    which alone increases the distance.
    """
    other_run = model is not None and (Path(model) / "curves.json").is_file()
    result = judged(read_curves(Path(str(model)) if other_run else CURVES if CURVES.is_file() else TRANSFORMERS))
    if not other_run and (TRANSFORMERS / SHIPPED).is_dir():
        config = TransferConfig(samples=QUICK_SAMPLES) if quick else TransferConfig()
        title = f"{SHIPPED}, measured again" + (f" on {config.samples} captions" if quick else "")
        result.details[title] = {"FID": Judge(config)(ControlledTransformer.open(SHIPPED))}
    progress(1, 1, None)
    return result


def judged(curves: Curves) -> ClaimResult:
    """The result from curves; the value is the fraction of steps needed with resampling and rescaling."""
    if not {GRID_RESCALED, EXTRAPOLATED_RESCALED, GRID_PLAIN} <= set(curves):
        raise refuse(
            "curves", sorted(curves), [GRID_RESCALED, EXTRAPOLATED_RESCALED, GRID_PLAIN], "run the missing arms"
        )
    means = {arm: mean_curve(seeds) for arm, seeds in curves.items()}
    last = min(max(c) for c in means.values())
    ends = {arm: c[last] for arm, c in means.items()}
    level = max(ends.values())
    reached = {arm: steps_to_reach(c, level) for arm, c in means.items()}
    details: dict[str, Any] = {
        arm: {f"FID at {s}": round(v, 2) for s, v in means[arm].items()}
        | {f"steps to {level:.2f}": None if reached[arm] is None else round(float(reached[arm] or 0.0), 1)}
        | {"ends by seed": [c[last] for c in seeds.values()]}
        for arm, seeds in curves.items()
    }
    fraction = (last if reached[GRID_RESCALED] is None else float(reached[GRID_RESCALED] or 0.0)) / last
    holds = min(ends, key=lambda arm: ends[arm]) == GRID_RESCALED and fraction <= 0.5
    roles = dict.fromkeys(ends, "rival") | {GRID_RESCALED: "ours", EXTRAPOLATED_RESCALED: "trivial"}
    return ClaimResult(
        round(fraction, 3),
        None,
        holds,
        details,
        arms=arms(ends, roles),
        seeds=max(map(len, curves.values())),
        parts={
            "both together end lowest": min(ends, key=lambda arm: ends[arm]) == GRID_RESCALED,
            "at most half of the worst arm's steps": fraction <= 0.5,
        },
    )


SIZES, QUICK_ARMS = ((256, 256), (320, 192)), (positions.ENLARGED, positions.EXTRAPOLATED, "rope_yarn")


@claim(
    "resolution.positions",
    paper="RoPE scaling (PI, NTK, YaRN) and DyPE (arXiv 2510.20766), without training",
    figure="flow portraits of 128 px sampled at 256 x 256 and 320 x 192: fraction of the prompt's attributes that are "
    "shown",
    target="at 256 x 256 YaRN shows more than untouched positions, and every dynamic mode more than its static one (95 "
    "% intervals of the paired difference above 0)",
    minutes=8,
    quick_minutes=0.3,
)
def rotary_positions(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Every way to scale rotary positions on the same prompts and seeds, compared with the enlarged image of 128 px.

    Attributes are read at 64 px, so they tell whether there is one portrait; the Frechet distance is to renders of
    that size in classifier features; detail is the energy of the finest octave, 1 as in renders. ``quick`` samples 4
    images of one size in two modes and judges YaRN alone.
    """
    from ...engine.portraits.flow import load_flow_portraits
    from ...engine.portraits.scenes import sample_scenes

    flow, net, count = load_flow_portraits(model), load_classifier(), 4 if quick else positions.PROMPT_COUNT
    heads = head_counter(net, 40 if quick else 120)
    scenes = sample_scenes(range(positions.FIRST_SCENE, positions.FIRST_SCENE + count))
    arms, sizes = (QUICK_ARMS, SIZES[:1]) if quick else ((positions.ENLARGED, *positions.ARMS), SIZES)
    looks: dict[tuple[int, int], dict[str, positions.Look]] = {size: {} for size in sizes}
    for k, (size, arm) in enumerate((size, arm) for size in sizes for arm in arms):
        looks[size][arm] = positions.judge(net, heads, positions.draw(flow, arm, size, scenes, silent), scenes)
        progress(k + 1, len(sizes) * len(arms), None)
        print(f"{size[0]} x {size[1]}, {arm}: {line(looks[size][arm])}", flush=True)
    square = looks[SIZES[0]]
    gains = {"rope_yarn": mean_interval(square["rope_yarn"].hits - square[positions.EXTRAPOLATED].hits)}
    for arm in (a for a in square if a.endswith("_dynamic")):
        gains[arm] = mean_interval(square[arm].hits - square[arm.removesuffix("_dynamic")].hits)
    details = {f"{w} x {h}": {a: line(look) for a, look in by_arm.items()} for (w, h), by_arm in looks.items()}
    spans = {arm: [round(v, 3) for v in span] for arm, span in gains.items()}
    low, high = mean_interval(square["rope_yarn"].hits)
    return ClaimResult(
        value=round(float(square["rope_yarn"].hits.mean()), 3),
        interval=(round(low, 3), round(high, 3)),
        holds=all(span[0] > 0 for span in gains.values()),
        details={"95 % interval of the gain over as it stands, or over the static mode": spans} | details,
        arms=positions.shown_arms(square, "rope_yarn", positions.EXTRAPOLATED),
        n=count,
        parts={f"{arm} gains": span[0] > 0 for arm, span in gains.items()},
        tables=(positions.head_table(looks),),
    )


SIDES, PROMPTS, RUNS = (128, 192), 8, 3
COMPARED = {
    "a second pass": (receptive.SECOND_DILATED, receptive.SECOND),
    "from noise": (receptive.DILATED, receptive.UNTOUCHED),
}
"""Part of the claim -> the arm with dilation, and the same without."""


@claim(
    "resolution.receptive",
    paper="ScaleCrafter (arXiv 2310.07702): dilated convolutions",
    figure="portraits UNet of 64 px at 128 and 192 px: heads counted, fraction of the prompt's attributes that are "
    "shown",
    target="at both sizes a second pass with dilate shows more attributes than a plain one (95 % interval of "
    "the paired difference above 0) under each of three seeds, and one head in more pictures; from noise, too",
    minutes=8,
    quick_minutes=0.3,
)
def receptive_field(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Five arms on the same prompts and seeds; ``quick`` samples one seed of 3 prompts at 128 px.

    Heads are counted by a layer on the classifier's convolutions, whose accuracy on held-out renders is
    reported; the rest is as in ``resolution.positions``.
    """
    from ...engine.portraits.models import load_portraits
    from ...engine.portraits.scenes import sample_scenes

    portraits, net = load_portraits(model), load_classifier()
    count = head_counter(net, 40 if quick else 120)
    prompts, runs, sides = (3, 1, SIDES[:1]) if quick else (PROMPTS, RUNS, SIDES)
    scenes = sample_scenes(range(receptive.FIRST_SCENE, receptive.FIRST_SCENE + prompts))
    repeated = sample_scenes([receptive.FIRST_SCENE + k for _ in range(runs) for k in range(prompts)])
    looks: dict[int, dict[str, positions.Look]] = {side: {} for side in sides}
    for k, (side, arm) in enumerate((side, arm) for side in sides for arm in receptive.ARMS):
        seeds = (receptive.FIRST_SEED + 1000 * run for run in range(runs))
        images = torch.cat([receptive.draw(portraits, arm, side, scenes, seed) for seed in seeds])
        looks[side][arm] = positions.judge(net, count, images, repeated, details=False)
        progress(k + 1, len(sides) * len(receptive.ARMS), None)
    return judged_field(looks, runs, validation(count, 8 if quick else 32))


def judged_field(looks: dict[int, dict[str, positions.Look]], runs: int, counted: dict[str, float]) -> ClaimResult:
    """The result from each arm at each size, with the images of all seeds concatenated."""
    details: dict[str, Any] = {"counted right": counted}
    parts = dict.fromkeys(COMPARED, True)
    for side, by_arm in looks.items():
        for part, (dilated, plain) in COMPARED.items():
            difference = by_arm[dilated].hits - by_arm[plain].hits
            spans = [mean_interval(one_seed) for one_seed in difference.chunk(runs)]
            single = [float((by_arm[arm].heads == 1).float().mean()) for arm in (dilated, plain)]
            parts[part] &= all(low > 0 for low, _ in spans) and single[0] > single[1]
            details[f"{part}, {side} px: 95 % interval of the gain in shown attributes"] = {
                "all": [round(v, 3) for v in mean_interval(difference)],
                "by seed": [[round(v, 3) for v in span] for span in spans],
            }
    first = looks[SIDES[0]]
    low, high = mean_interval(first[receptive.SECOND_DILATED].hits)
    details |= {f"{side} px": {arm: line(look) for arm, look in by_arm.items()} for side, by_arm in looks.items()}
    return ClaimResult(
        round(float(first[receptive.SECOND_DILATED].hits.mean()), 3),
        (round(low, 3), round(high, 3)),
        all(parts.values()),
        details,
        n=len(first[receptive.SECOND_DILATED].hits),
        seeds=runs,
        arms=positions.shown_arms(first, receptive.SECOND_DILATED, receptive.SECOND),
        parts=parts,
        tables=(positions.head_table({(side, side): by_arm for side, by_arm in looks.items()}),),
    )
