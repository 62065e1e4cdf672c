"""The copy check on LoRAs trained on one, five and twenty portraits of a person: does a score follow the copies."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...engine.copies import CheckConfig, CopyCheck
from ...engine.diffusion.denoiser import Denoiser
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.network.condition import Condition
from ...engine.pipelines.nemo_prompts import conditions
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.train.lora_trainer import LoraTrainConfig, Subject, train_loras
from ..intervals import spearman, spearman_interval
from ..registry import ClaimResult, arms, claim
from .guidance_difference import pull
from .probed_model import DETECT, GUIDANCE, SHAPE, STEPS

SIZES = (1, 5, 20)
TUNING, MEASURED = 20_008_000, 20_010_000
"""First identity of the people that recipe and settings were chosen on, and of those that are measured. Those from
20,009,000 on were measured on two captions where their LoRA knew two: without it the model distinguished them."""
RECIPE = LoraTrainConfig(rank=8, alpha=8.0, steps=300, batch=2, lr=4e-3, schedule="cosine", weighting="debiased")
"""As many steps for every size, so that a single portrait is seen twenty times as often as one of twenty."""
QUICK_RECIPE = replace(RECIPE, steps=150)
NUMBER = "number of pictures (unknown in use)"
SCORED = ("nemo", "norm", "anisotropy", "sharpness")


@dataclass(frozen=True)
class SampleBudget:
    """People with a LoRA of each size, samples of each LoRA, and samples of what is usual."""

    people: int = 6
    seeds: int = 16
    usual: int = 8


class TrainingSet(NamedTuple):
    """Pictures of one LoRA: (n, 3, 64, 64) in [0, 1], a caption each, and the seed of its training."""

    name: str
    images: torch.Tensor
    captions: list[str]
    seed: int


def people_sets(people: Sequence[int]) -> list[TrainingSet]:
    """1, 5 and 20 portraits of each person."""
    from ..portraits.identities import training_pictures

    return [
        TrainingSet(f"person-{number}-of-{size}", *training_pictures(identity, size)[:2], number)
        for number, identity in enumerate(people)
        for size in SIZES
    ]


def train(
    folder: Path,
    sets: Sequence[TrainingSet],
    progress: Progress = silent,
    model: str | None = None,
    recipe: LoraTrainConfig = RECIPE,
) -> list[str]:
    """A LoRA for each set, in ``loras``, and its pictures in a folder of its name; returns the names."""
    from PIL import Image

    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    for module in (portraits.unet, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    subjects = []
    for name, images, captions, seed in sets:
        latents = portraits.vae.encode(images * 2 - 1).latent_dist.mean * portraits.vae.config.scaling_factor
        subject = Subject(name, latents, Condition(portraits.encode(captions).detach()), seed)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(images):
            picture = Image.fromarray((image.movedim(0, -1) * 255).round().byte().numpy())
            picture.save(folder / name / f"{i:02d}.png")
        (folder / name / "captions.txt").write_text("\n".join(captions), encoding="utf-8")
        subjects.append(lambda subject=subject: subject)
    names, denoiser = [each.name for each in sets], Denoiser.from_diffusers(portraits.pipeline())
    train_loras(denoiser, subjects, names, folder / "loras", recipe, together=12, progress=progress)
    return names


def check(folder: Path, name: str, budget: SampleBudget, model: str | None = None) -> CopyCheck:
    """The copy check of one LoRA on its first caption; the model without it says what is usual."""
    from ...engine.pipelines import copy_check

    return copy_check(
        _pipeline(model),
        _captions(folder, name),
        folder / "checks" / name,
        pictures=folder / name,
        lora=folder / "loras" / f"{name}.safetensors",
        config=CheckConfig(budget.seeds, usual=budget.usual),
        probe=DETECT,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
    )


@torch.no_grad()
def scores_of(folder: Path, name: str, model: str | None = None, lora: bool = True) -> dict[str, float]:
    """NeMo's score of the same caption and its rivals', with the LoRA; without it they are the baseline."""
    from ...engine.pipelines.copies import LoraSwitch

    pipe = _pipeline(model)
    with LoraSwitch(pipe).loaded(folder / "loras" / f"{name}.safetensors" if lora else None):
        denoiser = Denoiser.from_diffusers(pipe)
        cond, empty = conditions(pipe, [*_captions(folder, name), ""])
        ((score,), _) = score_prompts(make_probe(denoiser, config=DETECT), [cond], SHAPE, None)
        return {"nemo": score.value} | vars(pull(denoiser, cond, empty, SHAPE))


def _pipeline(model: str | None) -> Any:
    from ...engine.pipelines import NEMOPipeline
    from ...engine.portraits import load_portraits

    pipe = NEMOPipeline.from_pipe(load_portraits(model).pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _captions(folder: Path, name: str) -> list[str]:
    """The one that every LoRA was trained on, whatever its size: another would tell sizes apart by its words."""
    return (folder / name / "captions.txt").read_text(encoding="utf-8").split("\n")[:1]


@claim(
    "nemo.copy_check",
    paper="NeMo's score (Hintersdorf et al., NeurIPS 2024) on LoRAs; copies after Gu et al. 2023",
    figure="LoRAs of 1, 5 and 20 portraits: rank correlation of the score, which sees no portrait, with the copies",
    target="Spearman's rho >= 0.6 over LoRAs, and more than the same model's without the LoRA",
    minutes=8,
    quick_minutes=1.2,
)
def copies_of_loras(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Several people, each with a LoRA of every size; the same caption sampled with it, and scored without it too.

    Quick: two people, LoRAs of half as many steps, four samples of each.
    """
    budget = SampleBudget(2, 4, 4) if quick else SampleBudget()
    return measured(people_sets([MEASURED + i for i in range(budget.people)]), budget, model, progress, quick)


def measured(
    sets: Sequence[TrainingSet], budget: SampleBudget, model: str | None, progress: Progress, quick: bool
) -> ClaimResult:
    """Train on each set, count the copies, and correlate them with the scores; sets of one size are every third."""
    rates, rows = [], {}
    scores: dict[str, list[float]] = {name: [] for name in SCORED}
    without: dict[str, list[float]] = {name: [] for name in SCORED}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = train(folder, sets, progress, model, QUICK_RECIPE if quick else RECIPE)
        for number, name in enumerate(names):
            (checked,) = check(folder, name, budget, model).prompts
            full, bare = (scores_of(folder, name, model, lora) for lora in (True, False))
            assert checked.score is not None
            rates.append(checked.share)
            for score in SCORED:
                scores[score].append(checked.score if score == "nemo" else full[score])
                without[score].append(bare[score])
            area = float(checked.areas.mean())
            rows[name] = {"copies": round(rates[-1], 3), "area": round(area, 3), "nemo": round(scores["nemo"][-1], 3)}
            progress(number + 1, len(names), None)
    rho = spearman(scores["nemo"], rates)
    interval = spearman_interval(scores["nemo"], rates)
    baseline = spearman(without["nemo"], rates)
    by_size = {size: _mean(rates[i :: len(SIZES)]) for i, size in enumerate(SIZES)}
    rarity = spearman([-float(len(each.images)) for each in sets], rates)
    likely = interval[1] if quick else rho
    return ClaimResult(
        value=round(rho, 3),
        interval=interval,
        holds=likely >= 0.6 and rho > baseline,
        details={
            "rho of each score": {name: round(spearman(values, rates), 3) for name, values in scores.items()},
            "... of the model without the LoRA": {n: round(spearman(v, rates), 3) for n, v in without.items()},
            "rho of the number of portraits": round(rarity, 3),
            "share of copies by number of portraits": {size: round(rate, 3) for size, rate in by_size.items()},
            "by LoRA": rows,
        },
        arms=arms(
            {name: spearman(values, rates) for name, values in scores.items()}
            | {"NeMo's score without the LoRA": baseline, NUMBER: rarity},
            {
                "nemo": "ours",
                "norm": "rival",
                "anisotropy": "rival",
                "sharpness": "rival",
                "NeMo's score without the LoRA": "trivial",
                NUMBER: "reference",
            },
            {"nemo": interval},
        ),
        n=len(names),
        seeds=budget.seeds,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
