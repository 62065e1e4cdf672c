"""The control conditioning section of ``vitrine demo``: one seed at five size conditions, under both weights."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.runtime.progress import Progress, silent
from ..charts import line_chart
from .claims import FLIPS, NAMES, SIZES, at_every_size, distances_of
from .controlled_transformer import ControlledTransformer
from .prompts import FIRST_SCENE, prompts_of, reader
from .sized_training import WEIGHTS

SHOWN, MEASURED = 2, 4


def section(report: Any, progress: Progress = silent) -> None:
    """Add the section; half a minute on one core."""
    report.add_paragraph(
        "Two small transformers were trained with the original size of their pictures as a condition: with a constant "
        "weight as in SDXL, and with the paper's power-cosine weight, which is 0 while the layout forms. Each line is "
        "one seed and prompt; only the size condition differs. In the training collection small pictures show other "
        "things than large ones, and these prompts leave such things open. The size should change sharpness, not the "
        "content."
    )
    report.add_images([(_curves(), "weight of the size over a run, from right to left")], width=560)
    _, prompts, seeds = prompts_of(MEASURED, FIRST_SCENE + 90_000, brief=True)
    table: list[list[object]] = [["weight", "features, 1 - cosine", "pixels, RMS"]]
    readings = reader()
    for i, name in enumerate(NAMES):
        drawn = at_every_size(ControlledTransformer.open(name), prompts, seeds)
        for k in range(SHOWN):
            _row(report, torch.stack([drawn[s, s][k] for s in SIZES]), [f"{name}, size {s} px" for s in SIZES])
        features, pixels, _ = distances_of(drawn, readings)
        table.append([name, f"{features.mean:.4f}", f"{pixels.mean:.4f}"])
        progress(i + 1, len(NAMES), None)
    report.add_paragraph(
        f"Mean distance between pictures of one seed at different sizes, {MEASURED} seeds, all pairs of five; "
        "less is better. `vitrine reproduce control.cross_size` measures it on more, with the Frechet distance."
    )
    report.add_table(table)
    _flips(report)


def _flips(report: Any) -> None:
    """Two captions with sides, at flip 0, without control, at flip 1."""
    from ...engine.portraits import caption, sample_scenes

    report.add_paragraph(
        "A third one learned that flip 1 mirrors the picture while its caption stays. At flip 0 it knows left from "
        "right, without the condition it guesses, at flip 1 it mirrors (roughly: it learned from mirrored latents). "
        "`vitrine reproduce control.flip` counts."
    )
    scenes = sample_scenes(range(FIRST_SCENE + 95_000, FIRST_SCENE + 95_000 + SHOWN)).with_attributes(
        hat="cap-right", mole="left", glasses="none"
    )
    model, prompts, seeds = ControlledTransformer.open(FLIPS), caption(scenes), list(range(SHOWN))
    conditions: dict[str, dict[str, Any]] = {
        "flip 0": {},
        "no control": {"silent_controls": True},
        "flip 1": {"controls": {"flip": 1.0}},
    }
    drawn = [model.draw(prompts, seeds, **settings) for settings in conditions.values()]
    for k, prompt in enumerate(prompts):
        _row(report, torch.stack([images[k] for images in drawn]), list(conditions))
        report.add_paragraph(prompt)


def _curves() -> Any:
    u = torch.linspace(0, 1, 41, dtype=torch.float64)
    series = {name: list(zip(u.tolist(), WEIGHTS[name].weight(u).tolist(), strict=True)) for name in NAMES}
    return line_chart(series, "gamma over the noise level", "t / T", "gamma")


def _row(report: Any, images: torch.Tensor, titles: list[str]) -> None:
    from ..portraits.page import to_pil

    report.add_images(list(zip(to_pil(images), titles, strict=True)), width=100)
