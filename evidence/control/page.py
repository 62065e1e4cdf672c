"""The control conditioning section of ``vitrine demo``: one seed told five sizes, under both weights of the size."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.charts import line_chart
from ...engine.control.cross_size import cross_size_consistency, rms_distance
from ...engine.progress import Progress, silent
from .claims import FIRST, FLIPS, NAMES, SIZES, _prompts, _reader, content_distance
from .world import WEIGHTS, Sibling

SHOWN, MEASURED = 2, 8


def section(report: Any, progress: Progress = silent) -> None:
    """Add the section; half a minute on one core."""
    report.add_heading("Control conditioning: the size a model is told")
    report.add_paragraph(
        "Two small transformers were told the original size of their training pictures, with a constant weight as in "
        "SDXL and with the paper's power-cosine weight, which is silent while the layout forms. Each row is one seed "
        "and prompt; only the size told differs. In the training collection small pictures show other things than "
        "large ones, and these prompts leave such things open. The size should change sharpness, not the content."
    )
    report.add_images([(_curves(), "weight of the size over a run, from right to left")], width=560)
    _, prompts, seeds = _prompts(MEASURED, FIRST + 90_000, brief=True)
    rows: list[list[object]] = [["weight", "features, 1 - cosine", "pixels, RMS"]]
    reader = _reader()
    for i, name in enumerate(NAMES):
        sibling = Sibling.open(name)
        drawn = {(s, s): sibling.draw(prompts, seeds, {"height": float(s), "width": float(s)}) for s in SIZES}
        for k in range(SHOWN):
            _row(report, torch.stack([drawn[s, s][k] for s in SIZES]), [f"{name}, told {s} px" for s in SIZES])
        distances = (content_distance(reader), rms_distance)
        found = [cross_size_consistency(drawn.__getitem__, list(drawn), d).mean for d in distances]
        rows.append([name, *(f"{v:.4f}" for v in found)])
        progress(i + 1, len(NAMES), None)
    report.add_paragraph(
        f"Mean distance between pictures of one seed told different sizes, {MEASURED} seeds, all pairs of five sizes; "
        "less is better. `vitrine reproduce control.cross_size` measures it on more, with the Frechet distance."
    )
    report.add_table(rows)
    _flips(report)


def _flips(report: Any) -> None:
    """Two captions with sides, told not mirrored, nothing, mirrored."""
    from ...engine.portraits import caption, sample_scenes

    report.add_paragraph(
        "A third one learned that a told flip mirrors the picture while its caption stays. Told 0 it knows left from "
        "right, told nothing it guesses, told 1 it mirrors (roughly: it learned from mirrored latents). "
        "`vitrine reproduce control.flip` counts."
    )
    scenes = sample_scenes(range(FIRST + 95_000, FIRST + 95_000 + SHOWN)).with_attributes(
        hat="cap-right", mole="left", glasses="none"
    )  # fmt: skip
    sibling, prompts, seeds = Sibling.open(FLIPS), caption(scenes), list(range(SHOWN))
    told: dict[str, dict[str, Any]] = {
        "told 0": {}, "told nothing": {"silent_controls": True}, "told 1": {"controls": {"flip": 1.0}},
    }  # fmt: skip
    drawn = [sibling.draw(prompts, seeds, **settings) for settings in told.values()]
    for k, prompt in enumerate(prompts):
        _row(report, torch.stack([images[k] for images in drawn]), list(told))
        report.add_paragraph(prompt)


def _curves() -> Any:
    u = torch.linspace(0, 1, 41, dtype=torch.float64)
    series = {name: list(zip(u.tolist(), WEIGHTS[name].weight(u).tolist(), strict=True)) for name in NAMES}
    return line_chart(series, "gamma over the noise level", "t / T", "gamma")


def _row(report: Any, images: torch.Tensor, titles: list[str]) -> None:
    from ..portraits.page import to_pil

    report.add_images(list(zip(to_pil(images), titles, strict=True)), width=100)
