"""The LoRA report's copy verdict on LoRAs whose copies are counted: does it follow them, and does it cry wolf."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.copies.nearest import Pictures, distances, thumbnails
from ...engine.nemo.blocked_copies import THIRD, share_interval
from ...engine.nemo.few_step_detection import FewStepSampler
from ...engine.nemo.noise_similarity import Request
from ...engine.portraits.shipped import PEOPLE_LORAS
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.nemo_options import FewStepConfig
from ..intervals import spearman, spearman_interval
from ..registry import ClaimResult, Table, arms, claim
from .copy_claims import MEASURED, SIZES, people_sets, train

FIRST = MEASURED + 100
"""Identity of the first person that is measured here; thresholds were chosen on people from ``TUNING`` on, on the
memorized pictures of ``later_plants`` and on the first two shipped people, none of which is measured."""
SKIPPED = 2
"""Shipped people that thresholds were chosen on."""
CAPTIONS = 2
SEEN, BARE = "the score that sees the portraits", "distance between samples without the LoRA"
RANDOM = "as many verdicts at random"
BASE = {SEEN: ("with portraits", 1), BARE: ("bare", -1)}
"""Baseline -> its figure of each LoRA, and the sign with which more means more copies."""


@dataclass(frozen=True)
class SampleBudget:
    """People with a LoRA of each size, shipped people's LoRAs that copy little, and full samples of each caption."""

    people: int = 2
    shipped: int = 20
    seeds: int = 4
    steps: int = 12


@dataclass(frozen=True)
class Case:
    """A LoRA, the pictures that it was trained on, and some of its captions."""

    name: str
    file: Path
    pictures: torch.Tensor
    captions: list[str]


@claim(
    "nemo.lora_report",
    paper="NeMo's detection (Hintersdorf et al., NeurIPS 2024) by four-step samples; copies after Gu et al. 2023",
    figure="LoRAs of 1, 5 and 20 portraits and of shipped people: how many that copy nothing the report calls bad, "
    "which sees no portrait",
    target="at most 5 % of LoRAs that copy nothing called bad, surely fewer than at random, and all whose samples copy "
    "in half of the cases or more",
    minutes=14,
    quick_minutes=1.2,
)
def report(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Reports of a few prompts, and twelve-step samples of the same captions from other seeds as the truth."""
    budget = SampleBudget(1, 3, 4) if quick else SampleBudget()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = measure(cases(folder, budget, progress, model), folder, budget, progress, model)
    return judged(rows, budget.seeds, quick)


def judged(rows: Mapping[str, Mapping[str, Any]], seeds: int, quick: bool = False) -> ClaimResult:
    """The verdict on :func:`measure`'s figures. How well the score orders LoRAs is told, and no part of it."""
    scores, fractions = [row["score"] for row in rows.values()], [row["copies"] for row in rows.values()]
    clean = [row for row in rows.values() if not row["copies"]]
    alarms = sum(row["verdict"] == "bad" for row in clean)
    most = sum(row["copies"] >= 0.5 for row in rows.values())
    caught = sum(row["verdict"] == "bad" for row in rows.values() if row["copies"] >= 0.5)
    fraction, interval = alarms / max(len(clean), 1), share_interval(alarms, len(clean))
    orders = {"the score": (spearman(scores, fractions), spearman_interval(scores, fractions))}
    for name, (key, sign) in BASE.items():
        values = [sign * row[key] for row in rows.values()]
        orders[name] = (spearman(values, fractions), spearman_interval(values, fractions))
    by_chance = sum(row["verdict"] == "bad" for row in rows.values()) / len(rows)
    parts = {
        "at most 5 % of LoRAs that copy nothing are called bad": (interval[0] if quick else fraction) <= 0.05,
        "surely fewer than as many verdicts at random": quick or interval[1] < by_chance,
        "all whose samples copy in half of the cases or more are called bad": caught == most,
    }
    return ClaimResult(
        round(fraction, 3), interval, all(parts.values()),
        {
            "called bad of LoRAs that copy nothing": f"{alarms} of {len(clean)}", "... 95 %": interval,
            "called look or bad of them": sum(row["verdict"] != "fine" for row in clean),
            "called bad of those whose samples copy in half of the cases or more": f"{caught} of {most}",
            "rank correlation with the fraction of copies, 95 %": {
                name: [round(rho, 4), span] for name, (rho, span) in orders.items()
            },
            "by LoRA": rows,
        },
        arms=arms({"ours": fraction, RANDOM: by_chance}, {"ours": "ours", RANDOM: "trivial"}, {"ours": interval}),
        n=len(rows), seeds=seeds, parts=parts, tables=(
            Table("Verdict on copies", ("LoRAs", "called bad", "95 %"), (
                ("half of the samples or more copy", f"{caught} of {most}", str(share_interval(caught, most))),
                ("no sample copies", f"{alarms} of {len(clean)}", str(interval)))),
        ),
    )  # fmt: skip


def cases(folder: Path, budget: SampleBudget, progress: Progress, model: str | None) -> list[Case]:
    """LoRAs trained here, and shipped ones."""
    from ..portraits.identities import FIRST_IDENTITY, training_pictures

    names, known = train(folder, people_sets([FIRST + i for i in range(budget.people)]), progress, model), []
    for number, name in enumerate(names):
        images, captions, _ = training_pictures(FIRST + number // len(SIZES), SIZES[number % len(SIZES)])
        known.append(Case(name, folder / "loras" / f"{name}.safetensors", images, captions[:CAPTIONS]))
    for file in sorted(PEOPLE_LORAS.glob("*.safetensors"))[SKIPPED : SKIPPED + budget.shipped]:
        images, captions, _ = training_pictures(FIRST_IDENTITY + int(file.stem.rsplit("-", 1)[1]), 16)
        known.append(Case(file.stem, file, images, captions[:CAPTIONS]))
    return known


def measure(
    cases: Sequence[Case], folder: Path, budget: SampleBudget, progress: Progress, model: str | None = None
) -> dict[str, Any]:
    """LoRA -> score and verdict of its report without pictures, score with them, share of copies in full samples."""
    from ...engine.copies import Material, ReportConfig, lora_report
    from ...engine.pipelines import PipelineModel
    from ...engine.portraits import caption, load_portraits, sample_scenes

    holder = PipelineModel(load_portraits(model).pipeline())
    ordinary = tuple(caption(sample_scenes(range(8_400_000, 8_400_002))))
    config = ReportConfig(strengths=(), prompts=CAPTIONS)
    rows: dict[str, Any] = {}
    usual: dict[str, torch.Tensor] = {}
    for number, case in enumerate(cases):
        both = []
        for pictures in (Pictures(), Pictures(["portrait"] * len(case.pictures), case.pictures.__getitem__)):
            material = Material(pictures, tuple(case.captions), ordinary=ordinary)
            (findings,) = lora_report([case.file], folder / "reports", lambda: holder, material, config).loras
            both.append(findings)
        sentence = next(s for s in both[0].summary if s.topic == "what it copies")
        own = both[0].own
        rows[case.name] = {
            "score": round(both[0].copy_score(), 3),
            "verdict": sentence.verdict,
            "with portraits": round(both[1].copy_score(), 3),
            "bare": round(sum(p.bare for p in own) / len(own), 3),
            "copies": round(copies(holder, both[0].facts, case, budget, usual), 3),
        }
        progress(number + 1, len(cases), None)
    return rows


@torch.no_grad()
def copies(holder: Any, facts: Any, case: Case, budget: SampleBudget, bare: dict[str, torch.Tensor]) -> float:
    """Largest share of a caption's full samples that copy a portrait; the bare model says what is usual.

    Args:
        bare: caption -> thumbnails of the bare model's samples; what is missing is sampled and kept there.
    """
    config, fractions, pictures = FewStepConfig(budget.seeds, 3000, budget.steps), [], thumbnails(case.pictures)
    with holder.lora(facts):
        with holder.at(0.0) as on:
            for text in case.captions:
                if text not in bare:
                    bare[text] = thumbnails(_full(holder, on, text, config))
        usual = torch.cat([bare[text] for text in case.captions])
        levels = distances(usual, pictures).median(0).values
        with holder.at(1.0) as on:
            for text in case.captions:
                away = distances(thumbnails(_full(holder, on, text, config)), pictures) / levels
                fractions.append(float((away.min(1).values < THIRD).float().mean()))
    return max(fractions)


def _full(holder: Any, on: Any, prompt: str, config: FewStepConfig) -> Any:
    sampler, (cond,) = FewStepSampler(on.denoiser, config, on.null), on.conditions([prompt])
    (latents,) = sampler.samples([Request(cond, sampler.noise(holder.shape).to(cond.device), {})])
    return holder.decode(latents)
