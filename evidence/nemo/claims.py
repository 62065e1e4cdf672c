"""Claims about NEMO on the portraits model, whose memorized pictures are known: ``vitrine reproduce 'nemo.*'``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.blocking_checks import VerifyConfig, verify
from ...engine.nemo.few_step_detection import sample_agreement
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.nemo.neuron_statistics import NeuronStatistics
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.nemo_options import FewStepConfig
from ..intervals import auroc, auroc_interval
from ..portraits.avataaars import open_model
from ..registry import ClaimResult, Table, arms, claim
from . import copy_claims, held_out, lora_report_claims, swept  # noqa: F401
from . import flow_claims as _flow  # noqa: F401  registers nemo.blocking.flow
from .probed_model import (
    DETECT,
    ORDINARY,
    PAPER,
    ROWS,
    SHAPE,
    ProbedModel,
    budget_of,
    captions,
    setting,
)
from .remedies import COPY, SEEDS, search_memorized  # registers nemo.blocking


@claim(
    "nemo.detection",
    paper=f"{PAPER}; agreement of few-step samples is ours",
    figure="Appendix B.4: the score as a detector (AUROC 0.98, TPR at 1 % FPR 0.88 on SD1.4), and samples of few steps",
    target="few-step samples: AUROC >= 0.98 and TPR at 1 % FPR >= 0.9, memorized captions against 200 ordinary ones",
    minutes=4,
    quick_minutes=0.25,
)
def detection(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Verbatim plants, and some colourings of each template, against captions that were never injected."""
    budget, portraits = budget_of(quick), open_model(model)
    probed = ProbedModel(portraits, Denoiser.from_diffusers(portraits.pipeline()), NeuronStatistics({}, {}, 0), 1.0)
    each = 100 // budget.colourings
    plants = portraits.dataset.plants()
    memorized = [c for p in plants for c in (p.captions[:1] if p.kind == "verbatim" else p.captions[:100:each])]
    texts = memorized, captions(ORDINARY, budget.ordinary, portraits.dataset)
    both = [probed.conditions(each) for each in texts]
    steps = (4,) if quick else (1, 2, 4)
    detectors = {f"{k} steps": _few_steps(probed, both, FewStepConfig(steps=k), progress) for k in steps}
    published = _one_step(probed, both, progress)
    positive, ordinary = detectors["4 steps"].scores
    lengths = [torch.tensor([float(len(portraits.tokenizer(t).input_ids)) for t in each]) for each in texts]
    interval, hits = auroc_interval(positive, ordinary), positive > ordinary.quantile(0.99)
    area, rate = auroc(positive, ordinary), float(hits.float().mean())
    likely = (interval[1], share_interval(int(hits.sum()), len(hits))[1]) if quick else (area, rate)
    tables = {name: d.table() for name, d in (detectors | {"published score, one step": published}).items()}
    columns = ("AUROC", "TPR at 1 % FPR", "batch rows a caption", "seconds")
    values = {"ours": area, "published score, one step": auroc(*published.scores), "number of tokens": auroc(*lengths)}
    roles = {"ours": "ours", "published score, one step": "rival", "number of tokens": "trivial"}
    spans = {"ours": interval, "published score, one step": auroc_interval(*published.scores)}
    return ClaimResult(
        value=round(area, 4),
        interval=interval,
        holds=likely[0] >= 0.98 and likely[1] >= 0.9,
        details={"detectors": tables, "captions, memorized and ordinary": [len(memorized), budget.ordinary]},
        arms=arms(values, roles, spans),
        n=len(memorized),
        tables=(Table("Detectors", ("", *columns), tuple((n, *(t[c] for c in columns)) for n, t in tables.items())),),
    )


@dataclass(frozen=True)
class Detector:
    """Scores of memorized and of ordinary captions, high where memorized; batch rows of a caption; seconds of all."""

    scores: tuple[torch.Tensor, torch.Tensor]
    rows: int
    seconds: float

    def table(self) -> dict[str, Any]:
        """For the report."""
        memorized, ordinary = self.scores
        return {
            "AUROC": round(auroc(memorized, ordinary), 4),
            "TPR at 1 % FPR": round(float((memorized > ordinary.quantile(0.99)).float().mean()), 3),
            "memorized [median, least]": [round(float(v), 3) for v in (memorized.median(), memorized.min())],
            "ordinary [median, largest]": [round(float(v), 3) for v in (ordinary.median(), ordinary.max())],
            "batch rows a caption": self.rows,
            "seconds": round(self.seconds, 1),
        }


def _few_steps(
    probed: ProbedModel, both: Sequence[Sequence[Any]], config: FewStepConfig, progress: Progress
) -> Detector:
    """Distances of samples, negative."""
    began, sampler = time.perf_counter(), probed.sampler(0, config)
    agreements = [sample_agreement(sampler, conds, SHAPE, progress, keep=False) for conds in both]
    memorized, ordinary = (-torch.tensor([a.distance for a in each]) for each in agreements)
    return Detector((memorized, ordinary), config.rows, time.perf_counter() - began)


def _one_step(probed: ProbedModel, both: Sequence[Sequence[Any]], progress: Progress) -> Detector:
    """The published score."""
    began, probe = time.perf_counter(), make_probe(probed.denoiser, config=DETECT, rows=ROWS)
    scores = [score_prompts(probe, conds, SHAPE, 1.0, progress)[0] for conds in both]
    memorized, ordinary = (torch.tensor([s.value for s in each]) for each in scores)
    return Detector((memorized, ordinary), DETECT.seeds, time.perf_counter() - began)


@claim(
    "nemo.verify",
    paper="Finding Dori (2025), on NeMo (Hintersdorf et al., NeurIPS 2024)",
    figure="blocked pictures come back under an optimised text embedding (memorization rate 0.20 -> 0.99)",
    target="other seeds cured for >= 75 % of the pictures; how many come back under attack is reported, not hidden",
    minutes=2,
    quick_minutes=0.4,
)
def verification(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Seeds the search never saw, then 50 Adam steps on the embedding against the memorized picture itself."""
    from ...engine.portraits import render

    budget = budget_of(quick)
    probed, seeds = setting(model, progress, budget), SEEDS[: budget.seeds]
    plants, _, sets = search_memorized(probed, progress, budget)
    probe = make_probe(probed.denoiser, config=probed.probe)
    pictures: dict[str, dict[str, Any]] = {}
    for plant, neurons in zip(plants, sets, strict=True):
        picture = render(plant.scenes).images
        with torch.no_grad():
            latents = probed.model.vae.encode(picture * 2 - 1).latent_dist.mean * probed.model.vae.config.scaling_factor
        (cond,) = probed.conditions(plant.captions[:1])
        verdict = verify(probe, cond, neurons, SHAPE, VerifyConfig(probed.tau), reference=latents)
        assert verdict.embedding is not None and verdict.embedding.text is not None
        images = probed.sample(verdict.embedding.text.expand(len(seeds), -1, -1), seeds, neurons)
        away = (images - picture).square().mean((1, 2, 3)).sqrt()
        pictures[plant.name] = {
            "cross-seed score [untouched, blocked]": [round(s.value, 3) for s in (verdict.untouched, verdict.blocked)],
            "RMS under attack, median": round(float(away.median()), 3),
        }
    scores = [figures["cross-seed score [untouched, blocked]"] for figures in pictures.values()]
    cured = sum(blocked <= probed.tau < untouched for untouched, blocked in scores)
    back = sum(figures["RMS under attack, median"] < COPY for figures in pictures.values())
    interval = share_interval(cured, len(pictures)) if quick else None
    return ClaimResult(
        value=round(cured / len(pictures), 3),
        interval=interval,
        holds=(interval[1] if interval else cured / len(pictures)) >= 0.75,
        details={
            "come back under attack": f"{back} of {len(pictures)}",
            "tau": round(probed.tau, 3),
            "by picture": pictures,
        },
        n=len(pictures),
        seeds=len(seeds),
        tables=(Table("Under an optimised embedding", ("", "pictures"), (("come back", back),)),),
    )
