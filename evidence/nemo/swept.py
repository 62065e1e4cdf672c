"""Every remedy at its own setting: chosen on half of the memorized pictures, measured on the other half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.nemo.block import BlockConfig, block
from ...engine.nemo.neurons import NeuronSet
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, arms, claim
from .baselines import PADDINGS, most_frequent, other_padding, random_neurons
from .probed_model import ORDINARY, PAPER, ProbedModel, budget_of, captions, setting, verbatim
from .remedies import COPY, SEEDS, Sampler, adjusted, scaled, with_tokens

EFFECT_FRACTIONS = (0.8, 0.9, 0.95, 0.98)
"""Where NeMo's search stops; the published stopping rule is measured too."""
USUAL_NORMS, TIMESTEPS = (1.0, 0.7, 0.5, 0.25), (981.0, 681.0)
"""Of the embedding adjustment: fractions of the usual norm of eps_c - eps_u where it stops, and its timesteps."""
TOKENS, FACTORS = (1, 2, 4, 10), (1.1, 1.25, 1.5, 2.0)
SOFTER, VOTES = (0.5, 0.25, -0.5), (0.25, 0.5, 0.75)
"""What found neurons are multiplied by instead of 0, and the share of searches that a shared neuron is found by."""
STOP = f"stop at {EFFECT_FRACTIONS[-1]:g}"
ENDS = {padding: (False,) if padding == "of the end token" else (False, True) for padding in PADDINGS}
PUBLISHED = "NeMo, published stopping rule"
TRIVIAL = ("nothing", "random neurons")
WITH_FOUND_NEURONS = ("NeMo", PUBLISHED, "NeMo, neurons scaled", "neurons of several pictures blocked for all")
"""Not rivals: they need the neurons that the search finds."""


@dataclass(frozen=True)
class Left:
    """What one setting leaves of one memorized picture.

    Attributes:
        copies: share of samples that are copies.
        agreement: share of the caption's attributes that samples show.
    """

    copies: float
    agreement: float


@claim(
    "nemo.settings",
    paper=PAPER,
    figure="Table 1's remedies, each with its own settings swept: copies left, and what the prompt still says",
    target="no remedy leaves as few copies as NeMo's neurons at as high a prompt agreement, on pictures that chose "
    "none of the settings",
    minutes=20,
    quick_minutes=0.8,
)
def settings(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """For each remedy the setting that leaves fewest copies of the first half, then shows most of what prompts say.

    Quick: one picture chooses and one is measured, and each remedy has the first and the last of its settings.
    """
    budget = budget_of(quick)
    probed, plants = setting(model, progress, budget), verbatim(budget)
    table: dict[str, dict[str, list[Left]]] = {}
    swept: Callable[[Sequence[Any]], Sequence[Any]] = _ends if quick else list
    searched, half = _neurons(probed, [p.captions[0] for p in plants], swept(EFFECT_FRACTIONS)), len(plants) // 2
    shared = {f"of {v:.0%} of the choosing half": most_frequent(searched[STOP][:half], v) for v in VOTES}
    for number, plant in enumerate(plants):
        blocked = {name: sets[number] for name, sets in searched.items()}
        for remedy, ways in _ways(probed, plant.captions[0], blocked, shared, SEEDS[: budget.seeds]).items():
            for name, sample in swept(list(ways.items())):
                table.setdefault(remedy, {}).setdefault(name, []).append(_left(sample, plant))
        progress(number + 1, len(plants), None)
    chosen = {remedy: _best(ways, half) for remedy, ways in table.items()}
    measured = {remedy: _mean(table[remedy][name][half:]) for remedy, name in chosen.items()}
    ours = measured["NeMo"]
    rivals = [v for k, v in measured.items() if k not in WITH_FOUND_NEURONS]
    ahead = all(v.copies > ours.copies or v.agreement < ours.agreement for v in rivals)
    if quick:  # a tie on one picture decides nothing
        ahead = all(v.copies >= ours.copies or v.agreement <= ours.agreement for v in rivals)
    return ClaimResult(
        round(ours.copies, 3), None, ahead,
        {
            "on the other half [setting, copies, agreement]": {
                k: [chosen[k], round(v.copies, 3), round(v.agreement, 3)] for k, v in measured.items()
            },
            "... copies of each picture there": {
                k: [round(v.copies, 3) for v in table[k][name][half:]] for k, name in chosen.items()
            },
            "every setting, all pictures [copies, worst picture, agreement]": {
                remedy: {name: _row(left) for name, left in ways.items()} for remedy, ways in table.items()
            },
        },
        arms=arms(
            {k: v.copies for k, v in measured.items()},
            {k: "ours" if k == "NeMo" else "trivial" if k in TRIVIAL else "rival" for k in measured},
        ), n=len(plants) - half, seeds=budget.seeds, tables=(
            Table("Attributes shown on the measured pictures", ("remedy, setting chosen on the others", "shown"),
                  tuple((f"{k}: {chosen[k]}", v.agreement) for k, v in measured.items())),
            Table("Every setting on all pictures", ("remedy and setting", "copies", "worst picture", "shown"),
                  tuple((f"{k}: {name}", *_row(left)) for k, ways in table.items() for name, left in ways.items())),
        ),
    )  # fmt: skip


def _ends(settings: Sequence[Any]) -> Sequence[Any]:
    """The first and the last of them."""
    return settings[:: max(1, len(settings) - 1)]


def _neurons(probed: ProbedModel, prompts: Sequence[str], fractions: Sequence[float]) -> dict[str, list[Any]]:
    """Stop -> the neurons to block for each prompt."""
    neurons = {
        f"stop at {fraction:g}": [probed.neurons(r) for r in probed.find(prompts, effect_fraction=fraction)]
        for fraction in fractions
    }
    return neurons | {"published": [probed.neurons(r) for r in probed.find(prompts, protocol="nemo")]}


def _ways(
    probed: ProbedModel, prompt: str, blocked: dict[str, Any], shared: dict[str, NeuronSet], seeds: Sequence[int]
) -> dict[str, dict[str, Sampler]]:
    """Remedy -> setting -> how to sample."""
    words = sorted({w for c in captions(ORDINARY, 200) for w in c.split()})

    def without(neurons: NeuronSet, factor: float = 0.0) -> Sampler:
        def sampled() -> torch.Tensor:
            with block(probed.model.backbone, neurons, BlockConfig(factor)):
                return probed.sample([prompt] * len(seeds), seeds)

        return sampled

    def padded(padding: str, end: bool) -> Sampler:
        return lambda: _padded(probed, prompt, seeds, padding, end)

    random = random_neurons(probed.model.backbone, blocked[STOP])
    adjusting = {
        f"{fraction:g} of the usual pull, t {t:g}": (fraction, t) for t in TIMESTEPS for fraction in USUAL_NORMS
    }
    return {
        "nothing": {"": without(NeuronSet({}))},
        "NeMo": {name: without(each) for name, each in blocked.items() if name != "published"},
        PUBLISHED: {"published": without(blocked["published"])},
        "NeMo, neurons scaled": {f"by {f:g}, {STOP}": without(blocked[STOP], f) for f in SOFTER},
        "neurons of several pictures blocked for all": {name: without(each) for name, each in shared.items()},
        "random neurons": {f"as many as {STOP}": without(random)},
        "random tokens": {str(k): lambda k=k: with_tokens(probed, prompt, seeds, words, k) for k in TOKENS},  # type: ignore[misc]
        "padding": {
            f"{padding}{', the end token too' if end else ''}": padded(padding, end)
            for padding in PADDINGS
            for end in ENDS[padding]
        },
        "embedding adjustment": {n: lambda a=a: adjusted(probed, prompt, seeds, *a) for n, a in adjusting.items()},  # type: ignore[misc]
        "attention scaling": {f"{f:g}": lambda f=f: scaled(probed, prompt, seeds, f) for f in FACTORS},  # type: ignore[misc]
    }


def _padded(probed: ProbedModel, prompt: str, seeds: Sequence[int], padding: str, end: bool) -> torch.Tensor:
    """Samples with other text states behind the prompt."""
    cond, empty = probed.conditions([prompt, ""])
    text = other_padding(cond, empty, len(probed.model.tokenizer(prompt).input_ids), padding, end).text
    assert text is not None
    return probed.sample(text.expand(len(seeds), -1, -1), seeds)


def _left(sample: Sampler, plant: Any) -> Left:
    from ...engine.portraits import render
    from ..portraits.classifier import attribute_accuracy, load_classifier, read

    images = sample()
    away = (images - render(plant.scenes).images).square().mean((1, 2, 3)).sqrt()
    accuracy = attribute_accuracy(read(load_classifier(), images), plant.scenes[[0] * len(images)])
    return Left(float((away < COPY).float().mean()), float(torch.tensor(list(accuracy.values())).nanmean()))


def _best(ways: dict[str, list[Left]], half: int) -> str:
    """The setting with fewest copies of the first half, among equals the one that shows most of what prompts say."""

    def rank(name: str) -> tuple[float, float]:
        left = _mean(ways[name][:half])
        return left.copies, -left.agreement

    return min(ways, key=rank)


def _mean(left: Sequence[Left]) -> Left:
    return Left(sum(v.copies for v in left) / len(left), sum(v.agreement for v in left) / len(left))


def _row(left: Sequence[Left]) -> list[float]:
    mean = _mean(left)
    return [round(mean.copies, 3), round(max(v.copies for v in left), 3), round(mean.agreement, 3)]
