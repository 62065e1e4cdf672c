"""Eq. 4 of Berrada et al. (2024), guidance that grows with the image size, against a sweep: ``resolution.guidance``.

Two models are used at their training size: the transformer trained at 64 px, and the same one fine-tuned at 128 px.
The best scale is chosen at 64 px, on other prompts and noise; the law gives one for 128 px, compared with the trivial
rule, which keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...engine.portraits import caption, render, sample_scenes
from ...engine.portraits.scenes import Scenes
from ...engine.resolution.shift import scaled_guidance
from ...engine.runtime.progress import Progress, silent
from ..control.controlled_transformer import ControlledTransformer
from ..control.fid_sets import by_set, mean_arms
from ..metrics import frechet_distance
from ..portraits.classifier import Reading, load_classifier, read
from ..registry import ClaimResult, Curves, claim
from .positions import shown_share
from .transfer_training import PAPER, TARGET_SIDE, TRAINED_SIDE

FIRST_SCENE = 9_000_000
"""First scene of the prompts; sets and sizes have different ones."""
MODELS = {TRAINED_SIDE: "power-cosine", TARGET_SIDE: f"power-cosine-{TARGET_SIDE}"}
SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
"""1 is no guidance. The law maps all but the last two to another of these at twice the side."""


class _Counts(NamedTuple):
    """Numbers of sets of prompts and noise, of images per set and size, and of reference renders."""

    sets: int
    small: int
    large: int
    renders: int


class Look(NamedTuple):
    """Metrics of a set of images: FID of classifier features, fraction of the prompts' attributes."""

    fid: float
    shown: float


Table = dict[int, dict[float, list[Look]]]
"""Side -> scale -> metrics of each set."""
FULL, QUICK = _Counts(3, 64, 32, 512), _Counts(2, 8, 4, 64)


@claim(
    "resolution.guidance",
    paper=PAPER,
    figure="Eq. 4: guidance for twice the side, compared with a sweep of scales",
    target="at 128 px the scale that the law makes of the best one at 64 px has a lower FID than that scale kept, in "
    "all of three sets",
    minutes=7,
    quick_minutes=0.25,
)
def guidance_law(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """FID of classifier features against renders of the size, by scale; images are read at 64 px.

    Nothing is tuned on what is measured: the scale is chosen at 64 px. ``quick`` samples small sets at three scales,
    and only tests that the two FIDs differ by less than a third.
    """
    counts, scales = (QUICK, (1.0, 1.5, 2.0)) if quick else (FULL, SCALES)
    by_side: Table = {side: {scale: [] for scale in scales} for side in MODELS}
    total, done = 2 * counts.sets * len(scales), 0
    for side, name in MODELS.items():
        drawn, look = ControlledTransformer.open(name), _look(side, counts.renders)
        count = counts.small if side == TRAINED_SIDE else counts.large
        for number in range(counts.sets):
            first = FIRST_SCENE + 10_000 * (2 * number + (side == TARGET_SIDE))
            scenes, seeds = sample_scenes(range(first, first + count)), list(range(first, first + count))
            for scale in scales:
                images = drawn.draw(caption(scenes), seeds, guidance=scale, side=side, batch=32 * TRAINED_SIDE // side)
                by_side[side][scale].append(look(images, scenes))
                done += 1
                progress(done, total, None)
    result = judged(by_side)
    if quick:
        level = min(min(looks).fid for looks in by_side[TARGET_SIDE].values())
        return replace(result, holds=abs(result.value) < level / 3)
    return result


def judged(by_side: Table) -> ClaimResult:
    """The result from each set, by side and scale; the value is the law's FID minus that of the kept scale."""
    means = {
        side: {k: sum(look.fid for look in v) / len(v) for k, v in table.items()} for side, table in by_side.items()
    }
    ratio = TARGET_SIDE / TRAINED_SIDE
    # a scale whose double is not in the sweep cannot be judged
    judgeable = [scale for scale in means[TRAINED_SIDE] if scaled_guidance(scale, ratio) in means[TARGET_SIDE]]
    kept = _lowest({scale: means[TRAINED_SIDE][scale] for scale in judgeable})
    law, details = scaled_guidance(kept, ratio), dict[str, Any]()
    for side, table in by_side.items():
        rows = {
            f"scale {k:g}": {"FID, by set": [x.fid for x in v], "shown, by set": [x.shown for x in v]}
            for k, v in table.items()
        }
        sets = [_lowest({k: v[n].fid for k, v in table.items()}) for n in range(len(table[kept]))]
        details[f"{side} px"] = rows | {"lowest FID at scale": _lowest(means[side])}
        details[f"{side} px"] |= {"lowest FID at scale, by set": sets}
    details["judged"] = {"kept": kept, "by the law": law}
    differences = [a.fid - b.fid for a, b in zip(by_side[TARGET_SIDE][law], by_side[TARGET_SIDE][kept], strict=True)]
    lines = {f"{side} px": [(k, round(v, 2)) for k, v in m.items()] for side, m in means.items()}
    chart = Curves("Guidance at both sizes", "guidance scale", "FID", lines)
    value, holds = (
        round(sum(differences) / len(differences), 2),
        law != kept and all(difference < 0 for difference in differences),
    )
    roles = dict.fromkeys((f"scale {k:g}" for k in by_side[TARGET_SIDE]), "rival")
    roles |= {"scale 1": "trivial", f"scale {law:g}": "ours"}
    fids = {f"scale {k:g}": [look.fid for look in looks] for k, looks in by_side[TARGET_SIDE].items()}
    return ClaimResult(
        value,
        (round(min(differences), 2), round(max(differences), 2)),
        holds,
        details,
        (chart,),
        mean_arms(fids, roles),
        seeds=len(differences),
        tables=(by_set(fids),),
    )


def _lowest(by_scale: dict[float, float]) -> float:
    """The scale with the lowest number."""
    return min(by_scale, key=by_scale.__getitem__)


def _look(side: int, count: int) -> Callable[[torch.Tensor, Scenes], Look]:
    """Compares images of that side with renders of other scenes, all at the classifier's size."""
    net = load_classifier()

    def reading(images: torch.Tensor) -> Reading:
        return read(net, functional.interpolate(images, (TRAINED_SIDE, TRAINED_SIDE), mode="area"))

    others = range(FIRST_SCENE + 500_000, FIRST_SCENE + 500_000 + count)
    chunks = (others[i : i + 64] for i in range(0, count, 64))
    real = torch.cat([reading(render(sample_scenes(chunk), side).images).features for chunk in chunks])

    def look(images: torch.Tensor, scenes: Scenes) -> Look:
        seen = reading(images)
        distance, shown = frechet_distance(seen.features, real), float(shown_share(seen, scenes).mean())
        return Look(round(distance, 2), round(shown, 3))

    return look
