"""The resolution transfer section of ``vitrine demo``: a 64-pixel model at 128 pixels, each switch on and off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from ...engine.resolution.transfer import apply
from ...engine.resolution.transfer_config import ResolutionTransferConfig
from ...engine.runtime.progress import Progress, silent
from ..control.controlled_transformer import ControlledTransformer
from .claims import CURVES, SHIPPED
from .curves import mean_curve, read_curves
from .transfer_training import FIRST_SCENE, TARGET_SIDE, TRAINED_SIDE

SHOWN = 4
SCHEDULES = {"none": "schedule as it was", "resample": "resampled"}
POSITIONS = {"grid": "grid", "extrapolate": "extrapolated"}


def section(report: Any, progress: Progress = silent) -> None:
    """Adds the section; a minute or two on one core."""
    from ...engine.portraits.shipped import shipped_transformers

    report.add_paragraph(
        "The portraits transformer was trained at 64 x 64. Below it samples 128 x 128 without further training. "
        "Positions are spread over the trained range (grid) or continue past it (extrapolated); the noise schedule is "
        "left alone, or its steps are moved to more noise (resample). The baseline: extrapolated, schedule left alone."
    )
    model, table = ControlledTransformer.open("power-cosine"), [["schedule", "positions", _agreement_title()]]
    pairs = [(s, p) for s in SCHEDULES for p in POSITIONS]
    for i, (schedule, positions) in enumerate(pairs):
        config = ResolutionTransferConfig(
            (TARGET_SIDE,) * 2, (TRAINED_SIDE,) * 2, schedule=schedule, pos_embed=positions, override=True
        )
        title = f"{SCHEDULES[schedule]}, {POSITIONS[positions]}"
        table.append([SCHEDULES[schedule], POSITIONS[positions], _show(report, model, title, config)])
        progress(i + 1, len(pairs) + 1, None)
    if SHIPPED in shipped_transformers():
        agreement = _show(report, ControlledTransformer.open(SHIPPED), "fine-tuned: relabelled, grid", None)
        table.append(["relabelled, fine-tuned", "grid", agreement])
    report.add_table(table)
    _training(report)
    progress(len(pairs) + 1, len(pairs) + 1, None)


def _agreement_title() -> str:
    return f"agreement with the prompt, {SHOWN} pictures"


def _show(report: Any, model: ControlledTransformer, title: str, config: ResolutionTransferConfig | None) -> str:
    """Adds a row of images; returns the fraction of attributes, read at 64 px, that agree with the prompts."""
    from ...engine.portraits import caption, sample_scenes
    from ..portraits.classifier import attribute_accuracy, load_classifier, read
    from ..portraits.page import to_pil

    scenes = sample_scenes(range(FIRST_SCENE, FIRST_SCENE + SHOWN))
    with nullcontext() if config is None else apply(model, config):
        images = model.draw(caption(scenes), list(range(SHOWN)), side=TARGET_SIDE)
    report.add_images([(p, title) for p in to_pil(images, 1)], width=100)
    reading = read(load_classifier(), functional.interpolate(images, (TRAINED_SIDE, TRAINED_SIDE), mode="area"))
    return f"{torch.tensor(list(attribute_accuracy(reading, scenes).values())).mean():.2f}"


def _training(report: Any) -> None:
    """The curves of fine-tuning, if they are shipped."""
    from ..charts import line_chart

    if not CURVES.is_file():
        return
    means = {arm: mean_curve(seeds) for arm, seeds in read_curves(CURVES).items()}
    series = {arm: [(float(s), v) for s, v in curve.items() if s] for arm, curve in means.items()}
    report.add_paragraph(
        "Fine-tuning at 128 px: Frechet distance of the attribute classifier's features, mean over seeds "
        "(`python -m vitrine.evidence.recipes transfer` trains, `vitrine reproduce resolution.transfer` judges)."
    )
    chart = line_chart(series, "Fine-tuning at 128 px", "step", "FID")
    report.add_images([(chart, "from the first measured step on; step 0 is in the table of the claim")], width=560)
