"""Claims about NEMO on the portraits model, whose memorized pictures are known: ``vitrine reproduce 'nemo.*'``."""

from __future__ import annotations

import torch

from ...engine.denoiser import Denoiser
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.nemo.statistics import NeuronStatistics
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from . import remedies as _comparison  # noqa: F401  registers nemo.blocking and nemo.verify
from .world import DETECT, ORDINARY, PAPER, ROWS, SEARCH, SHAPE, World, captions, setting


@claim(
    "nemo.detection",
    paper=PAPER,
    figure="Appendix B.4: the score as a detector (AUROC 0.98, TPR at 1 % FPR 0.88 on SD1.4)",
    target="AUROC >= 0.98 and TPR at 1 % FPR >= 0.9, planted captions against 200 ordinary ones",
)
def detection(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Verbatim plants, and ten colourings of each template, against captions that were never planted."""
    from ...engine.portraits import load_portraits, plants

    portraits = load_portraits(model)
    world = World(portraits, Denoiser.from_diffusers(portraits.pipeline()), NeuronStatistics({}, {}, 0), 1.0)
    probe = make_probe(world.denoiser, config=DETECT, rows=ROWS)
    planted = [c for p in plants() for c in (p.captions[:1] if p.kind == "verbatim" else p.captions[:100:10])]

    def values(prompts: list[str]) -> torch.Tensor:
        return torch.tensor([s.value for s in score_prompts(probe, world.conditions(prompts), SHAPE, 1.0, progress)[0]])

    hit, ordinary = values(planted), values(captions(ORDINARY, 200))
    area, rate = auroc(hit, ordinary), float((hit > ordinary.quantile(0.99)).float().mean())
    g = torch.Generator().manual_seed(0)
    draws = [auroc(_resample(hit, g), _resample(ordinary, g)) for _ in range(500)]
    return ClaimResult(
        value=round(area, 4),
        interval=_interval(draws),
        holds=area >= 0.98 and rate >= 0.9,
        details={
            "TPR at 1 % FPR": round(rate, 3),
            "planted [median, least]": [round(float(v), 3) for v in (hit.median(), hit.min())],
            "ordinary [median, largest]": [round(float(v), 3) for v in (ordinary.median(), ordinary.max())],
            "similarity": "single-scale SSIM on 16 x 16 latents, t index 15 of 50",
        },
    )


@claim(
    "nemo.passes",
    paper=PAPER,
    figure="Table 2: cost of the search",
    target="network rows of the published procedure / ours >= 2 for one prompt",
)
def passes(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Rows through the network, counted; the published procedure's from its own formula on the same decisions."""
    from ...engine.portraits import plants

    world = setting(model, progress)
    prompts = [p.captions[0] for p in plants() if p.kind == "verbatim"]
    ratios = {}
    for prompt in prompts:
        (parity,) = world.find([prompt], "parity")
        (ours,) = world.find([prompt], "chain")
        if parity.found is None or ours.found is None:
            continue
        assert parity.found.neurons.keys() == ours.found.neurons.keys()
        layers = sum(1 for v in parity.found.initial.values() if v)
        tested = sum(name.count("#") for name, _, _ in parity.found.tests)
        listed = sum(map(len, parity.found.initial.values()))
        distinct = sum(len(set(v)) for v in parity.found.initial.values())
        singles = tested + listed - distinct  # the published loop tests both copies of a neuron listed twice
        seeds = SEARCH.seeds
        published = 2 * seeds * (4 + parity.found.evaluations + layers + singles) + parity.found.evaluations
        ratios[prompt.split(" on ")[-1]] = round(published / ours.forwards, 2)
    values = sorted(ratios.values())
    middle = values[len(values) // 2] if values else 0.0
    return ClaimResult(middle, None, bool(values) and values[0] >= 2, {"by prompt": ratios})


def auroc(positive: torch.Tensor, negative: torch.Tensor) -> float:
    """Probability that a positive scores above a negative, ties counting half."""
    difference = positive[:, None] - negative[None]
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def _resample(values: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return values[torch.randint(len(values), (len(values),), generator=g)]


def _interval(draws: list[float]) -> tuple[float, float]:
    low, high = torch.tensor(draws).quantile(torch.tensor([0.025, 0.975])).tolist()
    return round(low, 4), round(high, 4)
