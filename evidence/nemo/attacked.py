"""What an optimised embedding finds after each remedy: blocking and erasing, on the memorized pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.nemo.block import block
from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.blocking_checks import AttackConfig, optimised_text
from ...engine.nemo.erase import EraseConfig, EraseData, Eraser
from ...engine.nemo.neurons import NeuronSet
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, arms, claim
from .probed_model import GUIDANCE, ORDINARY, QUICK, STATISTICS, ProbedModel, SampleBudget, budget_of, captions, setting
from .remedies import COPY, SEEDS, ordinary_figures, search_memorized

SURROGATE_SEED = 500
"""Of the pictures that erasing trains on; measured samples have :data:`SEEDS`, attacks seeds from 9000 on."""
ATTACKED_SEEDS = 5
"""Samples of each optimised embedding; its figure is their median."""
NEVER = ORDINARY + 1000
"""First identity of pictures that were never injected: what the attack does to a picture that was not memorized."""


@dataclass(frozen=True)
class Attack:
    """An optimised embedding: where it starts (the ``prompt`` or an ``other`` caption) and for how long (DoRI: 50)."""

    start: str
    steps: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"from the {self.start}, {self.steps} steps"


ATTACKS = (Attack("prompt", 50), Attack("other", 50))
SHORT, LONG = Attack("prompt", 15), Attack("prompt", 150)


@dataclass(frozen=True)
class Remedy:
    """A model, and the neurons blocked in it for each picture."""

    model: Any
    sets: Sequence[NeuronSet]


@dataclass(frozen=True)
class Target:
    """Pictures that must not come back: (P, 3, 64, 64) in [0, 1], their latents, and the captions that call them."""

    pictures: torch.Tensor
    latents: torch.Tensor
    prompts: list[str]


SampleTable = dict[str, dict[str, torch.Tensor]]
"""Remedy -> "by the prompt" or an attack's name -> (P, 3, S, S), of each picture the sample at the median distance."""


@claim(
    "nemo.erase",
    paper="Finding Dori (2025): what blocking leaves in the weights, and adversarial fine-tuning against it",
    figure="memorized pictures that an optimised embedding brings back after erasing, and after blocking",
    target="at most 1 of 8 after erasing, by any of three attacks, where blocking leaves 7 or more",
    minutes=45,
    quick_minutes=0.9,
)
def erasing(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Every remedy: copies by the prompt, copies under attack, and what ordinary captions pay."""
    return erasing_seen(model, progress, quick)[0]


SMALLER = SampleBudget(statistics=500, calibration=60, plants=4, ordinary=60, renders=250)
"""Half of the pictures, and no training of a LoRA: a third of the time."""


def erasing_seen(
    model: str | None = None, progress: Progress = silent, quick: bool = False, smaller: bool = False
) -> tuple[ClaimResult, Target, SampleTable]:
    """The claim's result, the pictures that must not come back, and samples of each remedy for the eye."""
    budget = SMALLER if smaller else budget_of(quick)
    probed = setting(model, progress, budget)
    plants, _, sets = search_memorized(probed, progress, budget)
    target = _target(probed, torch.cat([probed.model.draw(p.scenes) for p in plants]), [p.captions[0] for p in plants])
    none = [NeuronSet({})] * len(plants)
    remedies = {"untouched": Remedy(probed.model, none), "blocked": Remedy(probed.model, sets)}
    if not quick and not smaller:
        shared, union = most_frequent(sets), sets[0].merged(*sets[1:])
        remedies["most frequent neurons blocked"] = Remedy(probed.model, [shared] * len(sets))
        remedies["all pictures' neurons blocked"] = Remedy(probed.model, [union] * len(sets))
    trainings = _trainings(quick, lora=not smaller)
    data = _data(probed, target, sets, budget)
    for name, config in trainings.items():
        eraser = Eraser(probed.denoiser, data, config)
        eraser.run(progress=progress)
        remedies[name] = Remedy(replace(probed.model, unet=eraser.backbone.eval()), none)
    seen: SampleTable = {name: {} for name in remedies}
    table = {
        name: _figures(probed, each, target, budget, name in trainings, seen[name]) for name, each in remedies.items()
    }
    never = {} if quick else _never_injected(probed, budget)
    best = min(table[name]["back under any attack"] for name in trainings)
    blocked, count = table["blocked"]["back under any attack"], len(plants)
    enough = 7 / 8 * count
    result = ClaimResult(
        value=best,
        interval=None,
        holds=best <= count / 8 and blocked >= enough,
        details={
            "pictures": count,
            "share that comes back after erasing, 95 %": share_interval(best, count),
            "table": table,
            "never planted, untouched": never,
            "settings of the training": {name: config.to_dict() for name, config in trainings.items()},
        },
        arms=arms(
            {name: figures["back under any attack"] for name, figures in table.items()},
            {name: "ours" if name == "erased" else "trivial" if name == "untouched" else "rival" for name in table},
        ),
        n=count,
        seeds=ATTACKED_SEEDS,
        tables=(_pictures_table(table),),
    )
    return result, target, seen


def _pictures_table(table: dict[str, dict[str, Any]]) -> Table:
    """Counts of pictures and what ordinary captions pay, a row for each remedy."""
    names = [k for k, v in table["untouched"].items() if isinstance(v, (int, float))]
    return Table("Pictures, and ordinary captions", ("remedy", *names),
                 tuple((remedy, *(row.get(name) for name in names)) for remedy, row in table.items()))  # fmt: skip


def _trainings(quick: bool, lora: bool = True) -> dict[str, EraseConfig]:
    """The defaults, on all weights and as a LoRA."""
    if quick:
        return {"erased": EraseConfig(rounds=3, updates=8, batch=4, attack=AttackConfig(steps=15, batch=4))}
    return {"erased": EraseConfig()} | ({"erased, LoRA of rank 8": EraseConfig(rank=8, lr=2e-3)} if lora else {})


def most_frequent(sets: Sequence[NeuronSet], share: float = 0.5) -> NeuronSet:
    """Neurons that the searches of at least ``share`` of the pictures end with, to be blocked for every prompt."""
    votes = Counter((address, n) for each in sets for address, numbers in each.neurons.items() for n in numbers)
    chosen: dict[str, list[int]] = {}
    for (address, number), count in sorted(votes.items()):
        if count >= share * len(sets):
            chosen.setdefault(address, []).append(number)
    return NeuronSet({a: tuple(numbers) for a, numbers in chosen.items()}, sets[0].fingerprint)


@torch.no_grad()
def _target(probed: ProbedModel, pictures: torch.Tensor, prompts: list[str]) -> Target:
    latents = probed.model.vae.encode(pictures * 2 - 1).latent_dist.mean * probed.model.vae.config.scaling_factor
    return Target(pictures, latents, prompts)


def _data(
    probed: ProbedModel, target: Target, sets: Sequence[NeuronSet], budget: SampleBudget, count: int = 3
) -> EraseData:
    """Surrogates from the blocked model, and pictures of captions that are never measured."""
    seeds = [SURROGATE_SEED + i for i in range(count)]
    surrogates = []
    for prompt, neurons in zip(target.prompts, sets, strict=True):
        with block(probed.model.unet, neurons):
            surrogates.append(_latents(probed, [prompt] * count, seeds))
    ordinary = captions(STATISTICS, budget.ordinary)
    pictures = _latents(probed, ordinary, [SURROGATE_SEED + i for i in range(len(ordinary))])
    with torch.no_grad():
        text, other = probed.model.encode(target.prompts), probed.model.encode(ordinary)
    return EraseData(text, target.latents, torch.stack(surrogates), other, pictures)


def _latents(probed: ProbedModel, prompts: list[str], seeds: list[int]) -> torch.Tensor:
    from ..portraits.sampling import sample_latents

    rows = [slice(i, i + 64) for i in range(0, len(prompts), 64)]
    return torch.cat(
        [sample_latents(probed.model, prompts[r], seeds[r], steps=probed.steps, guidance=GUIDANCE) for r in rows]
    )  # fmt: skip


def _figures(
    probed: ProbedModel, remedy: Remedy, target: Target, budget: SampleBudget, long: bool, seen: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """One line of the table; ``seen`` receives the samples that its medians are of."""
    seeds, cured = SEEDS[: budget.seeds], replace(probed, model=remedy.model)
    texts = probed.model.encode(target.prompts).detach()
    plain, seen["by the prompt"] = _distances(cured, remedy, target, texts, seeds)
    figures: dict[str, Any] = {
        "copied by the prompt": int((plain.median(1).values < COPY).sum()),
        "... by a single sample": int((plain < COPY).any(1).sum()),
    }
    back = torch.zeros(len(target.prompts), dtype=torch.bool)
    attacks = (SHORT,) if budget == QUICK else (*ATTACKS, LONG) if long else ATTACKS
    for number, attack in enumerate(attacks):
        called = _called(probed, remedy, target, attack, 9000 + number)
        away, seen[attack.name] = _distances(cured, remedy, target, called, seeds[:ATTACKED_SEEDS])
        back |= away.median(1).values < COPY
        figures[f"back {attack.name}"] = int((away.median(1).values < COPY).sum())
        figures[f"RMS {attack.name}"] = [round(float(v), 3) for v in away.median(1).values.sort().values]
    figures["back under any attack"] = int(back.sum())
    return figures | ordinary_figures(cured, remedy.sets, budget)


def _distances(
    probed: ProbedModel, remedy: Remedy, target: Target, texts: torch.Tensor, seeds: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, seeds) pixel RMS between samples of each text and its picture; (P, 3, S, S) the samples at the median."""
    rows, middle = [], []
    for text, neurons, picture in zip(texts, remedy.sets, target.pictures, strict=True):
        images = probed.sample(text.expand(len(seeds), -1, -1), seeds, neurons)
        rows.append((images - picture).square().mean((1, 2, 3)).sqrt())
        middle.append(images[int(rows[-1].median(0).indices)])
    return torch.stack(rows), torch.stack(middle)


def _called(probed: ProbedModel, remedy: Remedy, target: Target, attack: Attack, seed: int) -> torch.Tensor:
    """(P, T, D) embeddings that call the pictures best from the model as the remedy left it."""
    starts = target.prompts if attack.start == "prompt" else captions(ORDINARY + 900, len(target.prompts))
    denoiser = Denoiser.from_diffusers(remedy.model.pipeline())
    for parameter in denoiser.backbone.parameters():
        parameter.requires_grad_(False)
    config = AttackConfig(steps=attack.steps, seed=seed)
    called = []
    for start, latents, neurons in zip(probed.conditions(starts), target.latents, remedy.sets, strict=True):
        with block(denoiser.backbone, neurons):
            called.append(optimised_text(denoiser, start, latents[None], config))
    return torch.cat(called)


def _never_injected(probed: ProbedModel, budget: SampleBudget) -> dict[str, Any]:
    """The same attacks on pictures that were never injected, from their own captions."""
    from ...engine.portraits import caption, sample_scenes

    scenes = sample_scenes(range(NEVER, NEVER + budget.plants))
    target = _target(probed, probed.model.draw(scenes), caption(scenes))
    remedy = Remedy(probed.model, [NeuronSet({})] * budget.plants)
    figures: dict[str, Any] = {}
    for attack in (ATTACKS[0], LONG):
        called = _called(probed, remedy, target, attack, 9100)
        away = _distances(probed, remedy, target, called, SEEDS[:ATTACKED_SEEDS])[0].median(1).values
        figures[f"back {attack.name}"] = int((away < COPY).sum())
        figures[f"RMS {attack.name}"] = [round(float(v), 3) for v in away.sort().values]
    return figures
