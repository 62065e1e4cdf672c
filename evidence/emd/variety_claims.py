"""Methods that restore a fast student's variety: ``vitrine reproduce emd.variety_flow``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from ...engine.emd import measure_variety
from ...engine.portraits.captions import OPTIONAL
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, claim
from .flow_student import draw_flow
from .mixture_claims import spread, spread_arms
from .variety import SEEDS, STUDENT_ALONE, TEACHER, WITH_BASE, Drawn


@claim(
    "emd.variety_flow",
    paper="Gandikota & Bau 2025 (Diversity Distillation)",
    figure="mean feature distance between seeds with the base for the first step, over a collapsed student's alone",
    target="above 1 at 95 % over 8 prompts, and prompt agreement not below that of text noise which reaches as far, or "
    "of the strongest if none does",
    minutes=3,
    quick_minutes=0.6,
)
def variety_flow(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """A four-step student of the flow portraits that generates one picture for every seed, and what restores variety.

    Eight prompts that do not mention five attributes, eight seeds, four calls a picture; features of the attribute
    classifier. The teacher's ten steps are the reference of precision and recall. The student is trained here, in half
    a minute. The base alone is measured at the same number of calls: four steps without guidance, two with it. Quick:
    three prompts, two thirds of the updates.
    """
    return _judged(draw_flow(3, 40, progress) if quick else draw_flow(progress=progress))


def _judged(drawn: Drawn) -> ClaimResult:
    rows, distances = measured(drawn)
    gains = [pair - alone for pair, alone in zip(distances[WITH_BASE], distances[STUDENT_ALONE], strict=True)]
    gain = spread(gains)
    rows["distance, base for 1 of 4 steps minus student's"] = gain
    alone = rows[STUDENT_ALONE]["distance"]["mean"]
    rivals = [row for name, row in rows.items() if name.startswith("noise on the text")]
    farthest = max(row["distance"]["mean"] for row in rivals)
    reach = min(rows[WITH_BASE]["distance"]["mean"], farthest)
    as_far = [row["agreement"] for row in rivals if row["distance"]["mean"] >= reach]
    holds = gain["mean"] - gain["+-"] > 0 and all(rows[WITH_BASE]["agreement"] >= other for other in as_far)
    interval = tuple(1 + (gain["mean"] + sign * gain["+-"]) / alone for sign in (-1, 1))
    reached = {arm.name: arm for arm in spread_arms(rows, "", "distance")}
    roles = {WITH_BASE: "ours", STUDENT_ALONE: "trivial", TEACHER: "reference"}
    price = tuple((name, row["recall"], row["agreement"]) for name, row in rows.items() if "recall" in row)
    return ClaimResult(
        1 + gain["mean"] / alone,
        (interval[0], interval[1]),
        holds,
        rows,
        n=len(gains),
        seeds=SEEDS,
        arms=tuple(replace(arm, role=roles.get(name, "rival")) for name, arm in reached.items()),
        tables=(Table("Price", ("way", "recall", "prompts shown"), price),),
    )


def measured(drawn: Drawn) -> tuple[dict[str, dict], dict[str, list[float]]]:
    """(metrics of each sampling method, its distance on each prompt)."""
    from ..portraits.classifier import attribute_accuracy, load_classifier, read

    net, rows, distances = load_classifier(), {}, {}
    count = len(drawn.scenes)
    every = drawn.scenes[torch.arange(count).repeat_interleave(SEEDS).numpy()]
    readings = {name: read(net, _at_64(p.flatten(0, 1))) for name, p in drawn.pictures.items()}
    features = {name: reading.features.view(count, SEEDS, -1) for name, reading in readings.items()}
    for name, reading in readings.items():
        each = [measure_variety(f, r) for f, r in zip(features[name], features[TEACHER], strict=True)]
        accuracy = {k: v for k, v in attribute_accuracy(reading, every).items() if k not in OPTIONAL}
        distances[name] = [v.distance for v in each]
        rows[name] = {
            "calls": drawn.calls[name],
            "distance": spread(distances[name]),
            "Vendi": spread([v.vendi for v in each]),
            "precision": round(sum(v.precision or 0 for v in each) / count, 3),
            "recall": round(sum(v.recall or 0 for v in each) / count, 3),
            "agreement": round(sum(accuracy.values()) / len(accuracy), 4),
        }
    return rows, distances


def _at_64(pictures: torch.Tensor) -> torch.Tensor:
    """The input of the attribute classifier."""
    return pictures if pictures.shape[-1] == 64 else functional.interpolate(pictures, (64, 64), mode="area")
