"""The dose: how strongly and how many neurons are blocked, judged by few-step samples, in order of what it costs.

Blocking may change one-step predictions as far as it can and samples still end in the memorized picture. So the found
neurons are multiplied by less and less, then more neurons are blocked, until no sample agrees with the untouched ones.
A dose that leaves no copy but changes ordinary captions too much is weakened until it does not.
The doses are tried on a dozen samples. One that leaves no copy among these is verified on more, of fresh seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..diffusion.noise import seeded_noise
from ..errors import refuse
from ..io.charts import curve_picture
from ..network.condition import Condition
from ..network.site import ModuleSite
from ..runtime.progress import Progress, silent
from ..tracing.fingerprint import width_of
from .calibration import SampleThreshold
from .few_step_detection import Agreement, FewStepSampler
from .noise_similarity import Neurons, Request
from .search import Outcome

if TYPE_CHECKING:
    from PIL.Image import Image

FACTORS = (0.0, -0.1, -0.2)
"""What found neurons are multiplied by, one after another."""
STEP = 0.05
"""Factors of a dose that is weakened since it costs too much are multiples of this."""
SAMPLES, FRESH = 12, 32
"""Of the prompt at each dose, from the calibration's first seed on; and of seeds that no dose was tried on, before the
word cured: a dose that leaves 10 % copies passes these with a chance of 0.034, all together of 0.01."""
MOST_COST = 0.6
"""Of the usual distance: a dose that moves ordinary captions' samples further is not taken. Found neurons move them by
0.4 to 0.5 of it, all of down and mid by 1.1 (one portrait in a usual pose, 40 repetitions, none of the held-out, which
is all that this was chosen on)."""


@dataclass(frozen=True)
class Dose:
    """Neurons, and what they are multiplied by.

    Attributes:
        name: in words.
        neurons: address -> indices.
    """

    name: str
    neurons: Neurons
    factor: float = 0.0

    @property
    def short(self) -> str:
        """The name, for a chart."""
        return self.name.replace(" neurons", "").replace("factor ", "")

    @property
    def count(self) -> int:
        """How many neurons."""
        return sum(len(set(indices)) for indices in self.neurons.values())


UNTOUCHED = Dose("untouched", {}, 1.0)


@dataclass(frozen=True)
class DosePoint:
    """What one dose does.

    Attributes:
        copies, samples: how many samples of the prompt still agree with its untouched ones, of how many.
        fresh: of the samples, how many have seeds that no dose was tried on.
        distance: of the median sample to the untouched ones, as a fraction of the usual distance.
        cost: how far it moves samples of ordinary captions, as a fraction of the usual distance; NaN where there were
            no captions.
    """

    dose: Dose
    copies: int
    samples: int
    distance: float
    cost: float = math.nan
    fresh: int = 0

    @property
    def affordable(self) -> bool:
        """Whether ordinary captions hardly change, as far as that was measured."""
        return not self.cost > MOST_COST

    @property
    def promising(self) -> bool:
        """Whether no sample agrees with the untouched ones any more, at a cost that is affordable."""
        return not self.copies and self.affordable

    @property
    def too_strong(self) -> bool:
        """Whether no sample agrees any more, but at too high a cost."""
        return not self.copies and not self.affordable

    @property
    def weakened(self) -> Dose:
        """The dose with the next factor at which it should be affordable: costs grow with what a factor takes away."""
        name, factor = self.dose.name.split(", factor")[0], self.dose.factor
        expected = 1 - (1 - factor) * MOST_COST / self.cost
        steps = max(math.ceil(expected / STEP), round(factor / STEP) + 1)
        return replace(self.dose, name=f"{name}, factor {steps * STEP:g}", factor=steps * STEP)

    @property
    def cures(self) -> bool:
        """The same, verified on samples of fresh seeds."""
        return self.promising and self.fresh > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files."""
        plain = {"dose": self.dose.name, "neurons": self.dose.count, "factor": self.dose.factor}
        plain |= {"copies": self.copies, "samples": self.samples, "fresh": self.fresh, "distance": self.distance}
        return plain | ({} if math.isnan(self.cost) else {"cost": self.cost})


@dataclass(frozen=True)
class DoseCurve:
    """The doses that were tried for one prompt, in order of their cost, and which was chosen.

    Attributes:
        untouched: how many samples agree with each other while nothing is blocked.
        before: the agreement of these, as detection measures it.
        points: of the doses tried.
        after: agreements at these doses.
        rows: UNet evaluations that they took, with this prompt's part of the untouched ordinary captions.
    """

    untouched: DosePoint
    before: Agreement
    points: tuple[DosePoint, ...] = ()
    after: tuple[Agreement, ...] = ()
    rows: int = 0

    def with_point(self, point: DosePoint, agreement: Agreement, rows: int) -> DoseCurve:
        """The same with one more dose."""
        return replace(self, points=(*self.points, point), after=(*self.after, agreement), rows=self.rows + rows)

    def verified(self, point: DosePoint, rows: int) -> DoseCurve:
        """The same with the last dose verified."""
        return replace(self, points=(*self.points[:-1], point), rows=self.rows + rows)

    @property
    def ended(self) -> bool:
        """Whether a dose cures, or there is nothing to cure."""
        return bool(self.points) and (self.points[-1].cures or not self.untouched.copies)

    def following(self, ladder: Sequence[Dose]) -> Dose | None:
        """The next dose: of the ladder until one is too strong, and then that one weakened until it is affordable."""
        if self.points and self.points[-1].too_strong:
            return self.points[-1].weakened
        over = len(self.points) >= len(ladder) or any(point.too_strong for point in self.points)
        return None if over else ladder[len(self.points)]

    @property
    def samples(self) -> tuple[Agreement, Agreement]:
        """Agreement of samples without blocking, and at the chosen dose."""
        return self.before, self.after[self.points.index(self.chosen)]

    @property
    def chosen(self) -> DosePoint:
        """The first dose that cures; where none does, the affordable one that leaves the smallest part of copies."""
        affordable = [point for point in self.points if point.affordable] or list(self.points[:1])
        least = min(affordable, key=lambda p: (p.copies / p.samples, -p.distance))
        return next((p for p in self.points if p.cures), least)

    @property
    def verdict(self) -> str:
        """``not memorized`` where untouched samples do not agree, ``cured``, ``reduced`` or ``not cured``."""
        if not self.untouched.copies:
            return "not memorized"
        if self.chosen.cures:
            return "cured"
        fewer = self.chosen.copies / self.chosen.samples < self.untouched.copies / self.untouched.samples
        return "reduced" if fewer else "not cured"

    @property
    def agreeing(self) -> str:
        """How many samples still agree at the chosen dose, of how many."""
        return samples_agreeing(self.chosen.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files."""
        return {
            "untouched": self.untouched.to_dict(),
            "points": [point.to_dict() for point in self.points],
            "chosen": self.points.index(self.chosen),
        }


def dose_lines(plain: Mapping[str, Any] | None) -> list[str]:
    """What each dose did, one a line, the chosen one marked; from :meth:`DoseCurve.to_dict`."""
    if not plain:
        return []
    lines = [_line(plain["untouched"])]
    for number, point in enumerate(plain["points"]):
        lines.append(_line(point) + (" <- chosen" if number == plain["chosen"] else ""))
    return lines


def _line(point: Mapping[str, Any]) -> str:
    size = f" ({point['neurons']} neurons)" if point["neurons"] else ""
    cost = point.get("cost", math.nan)
    moved = "" if math.isnan(cost) else f", ordinary captions move by {cost:.2f} of the usual distance"
    if cost > MOST_COST:
        moved += f", more than {MOST_COST:g}"
    return f"{point['dose']}{size}: {samples_agreeing(point)}{moved}"


def samples_agreeing(point: Mapping[str, Any]) -> str:
    """How many samples still agree, of how many and of how many fresh seeds; from :meth:`DosePoint.to_dict`."""
    fresh = f" ({point['fresh']} of fresh seeds)" if point.get("fresh") else ""
    return f"{point['copies']} of {point['samples']} samples agree{fresh}"


def dose_picture(curve: DoseCurve) -> Image:
    """Samples that still agree at each dose, against what it costs ordinary captions, or else in the order tried."""
    tried = [curve.untouched, *curve.points]
    measured = not any(math.isnan(point.cost) for point in curve.points)
    costs = [0.0, *(point.cost for point in curve.points)] if measured else list(range(len(tried)))
    along = "how far ordinary captions' samples move (1: as two samples differ)" if measured else "doses, in order"
    chosen = curve.points.index(curve.chosen) + 1 if curve.points else 0
    title = f"{curve.verdict}: {curve.chosen.dose.name}, {curve.agreeing}"
    order = sorted(range(len(tried)), key=costs.__getitem__)
    points = [(costs[i], 100 * tried[i].copies / tried[i].samples) for i in order]
    limit = (MOST_COST, "most that a dose may cost") if measured else None
    names = [tried[i].dose.short for i in order]
    return curve_picture(points, title, along, "% agree", names, order.index(chosen), limit)


def doses_of(backbone: nn.Module, sites: Sequence[ModuleSite], outcome: Outcome) -> list[Dose]:
    """What is tried after a search, in order of its cost: found neurons, all candidates, all of down and mid.

    Args:
        sites: the model's value sites.
    """
    candidates = {address: sorted(set(indices)) for address, indices in outcome.initial.items() if indices}
    doses = [Dose(f"found neurons, factor {factor:g}", outcome.neurons, factor) for factor in FACTORS]
    doses += [Dose(f"all candidates, factor {factor:g}", candidates, factor) for factor in FACTORS]
    if any(site.address.startswith("up-") for site in sites):
        lower = [site for site in sites if not site.address.startswith("up-")]
        doses.append(Dose("all of down and mid, factor 0", {s.address: range(width_of(backbone, s)) for s in lower}))
    return doses[:1] + [dose for dose in doses[1:] if dose.count]


@torch.no_grad()
def escalate(
    sampler: FewStepSampler,
    conds: Sequence[Condition],
    outcomes: Sequence[Outcome],
    shape: tuple[int, int, int],
    most_rows: Sequence[int] | None = None,
    progress: Progress = silent,
) -> list[DoseCurve]:
    """Try doses for each prompt until samples no longer agree with its untouched ones; all prompts together.

    Args:
        sampler: with a threshold, and with ordinary captions where the cost shall be measured.
        conds, outcomes: of each prompt: its condition, one row, and what its search ended with.
        shape: (C, h, w) of the latents.
        most_rows: UNet evaluations for each prompt, beyond which no further dose is tried; the first always is, and
            verified.
        progress: counts UNet evaluations, of as many as all doses would take.
    """
    if sampler.threshold is None:
        raise refuse("sampler", "without a threshold", "one measured on this model", "calibrate")
    judge = _Judge(sampler, shape)
    ladders = [doses_of(sampler.denoiser.backbone, sampler.sites, outcome) for outcome in outcomes]
    untouched = judge.samples([(cond, UNTOUCHED) for cond in conds])
    shared = judge.rows[0] + judge.rows[1] // max(1, len(conds))
    curves = [DoseCurve(judge.point(UNTOUCHED, each, each), judge.agreement(each), rows=shared) for each in untouched]
    each, verifying = sum(judge.rows), judge.verifying_rows
    most = max(map(len, ladders), default=0)
    least, most_rows = shared + each + verifying, most_rows or [sys.maxsize] * len(curves)
    limits = [max(rows, least) for rows in most_rows]
    expected = max((min(n, shared + most * (each + verifying)) for n in limits), default=1)

    def following(i: int) -> Dose | None:
        room = curves[i].rows + each + verifying <= limits[i]
        return curves[i].following(ladders[i]) if room and not curves[i].ended else None

    progress(shared, expected, None)
    while waiting := {i: dose for i in range(len(curves)) if (dose := following(i)) is not None}:
        sampled = judge.samples([(conds[i], dose) for i, dose in waiting.items()])
        costs = judge.costs(list(waiting.values()))
        for (i, dose), samples, cost in zip(waiting.items(), sampled, costs, strict=True):
            point = replace(judge.point(dose, samples, untouched[i]), cost=cost)
            curves[i] = curves[i].with_point(point, judge.agreement(samples), each)
        promising = [i for i in waiting if curves[i].points[-1].promising and curves[i].untouched.copies]
        fresh = judge.fresh_samples([(conds[i], waiting[i]) for i in promising], max(len(c.points) for c in curves))
        for i, samples in zip(promising, fresh, strict=True):
            curves[i] = curves[i].verified(judge.verified(curves[i].points[-1], samples, untouched[i]), verifying)
        progress(min(max(curve.rows for curve in curves), expected), expected, None)
    progress(expected, expected, None)
    return curves


@torch.no_grad()
def changed_prompt(
    sampler: FewStepSampler, cond: Condition, changed: Condition, shape: tuple[int, int, int]
) -> DosePoint:
    """How many samples of a changed condition still agree with those of the prompt's own; nothing is blocked."""
    judge = _Judge(replace(sampler, ordinary=()), shape)
    untouched, after = judge.samples([(cond, UNTOUCHED), (changed, UNTOUCHED)])
    point = replace(judge.point(Dose("embedding adjusted", {}, 1.0), after, untouched), cost=0.0)
    if point.promising and bool(judge.agreeing(untouched).any()):
        (fresh,) = judge.fresh_samples([(changed, UNTOUCHED)], 1)
        point = judge.verified(point, fresh, untouched)
    sampler.forwards += judge.sampler.forwards - sampler.forwards
    return point


@dataclass
class _Judge:
    """Samples prompts and ordinary captions at a dose, and compares both with what they are untouched."""

    sampler: FewStepSampler
    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        first, seeds = self.sampler.config.first_seed, max(SAMPLES, self.sampler.config.seeds)
        self.noise = seeded_noise(range(first, first + seeds), self.shape)
        self.each = self.sampler.config.rows // self.sampler.config.seeds
        self.ordinary = self.sampler.ordinary
        self.untouched = self._ordinary([UNTOUCHED])[0] if self.ordinary else torch.empty(0)

    @property
    def rows(self) -> tuple[int, int]:
        """UNet evaluations of one dose: of the prompt's samples, and of the ordinary captions'."""
        return self.each * len(self.noise), self.each * len(self.ordinary)

    @property
    def verifying_rows(self) -> int:
        """UNet evaluations of the prompt's samples of fresh seeds."""
        return self.each * FRESH

    def samples(self, prompts: Sequence[tuple[Condition, Dose]]) -> list[torch.Tensor]:
        """(S, C, h, w) latents of each prompt, of the seeds on which doses are tried."""
        return self._sampled(prompts, self.noise) if prompts else []

    def fresh_samples(self, prompts: Sequence[tuple[Condition, Dose]], attempt: int) -> list[torch.Tensor]:
        """The same of seeds on which no dose was tried, others for each attempt from 1 on."""
        if not prompts:
            return []
        first = self.sampler.config.first_seed + len(self.noise) + (attempt - 1) * FRESH
        return self._sampled(prompts, seeded_noise(range(first, first + FRESH), self.shape))

    def _sampled(self, prompts: Sequence[tuple[Condition, Dose]], noise: torch.Tensor) -> list[torch.Tensor]:
        noise = noise.to(prompts[0][0].device)
        requests = [Request(cond, noise, dose.neurons, dose.factor) for cond, dose in prompts]
        return [samples.cpu() for samples in self.sampler.samples(requests)]

    def _ordinary(self, doses: Sequence[Dose]) -> list[torch.Tensor]:
        """(captions, C, h, w) latents at each dose: one of each caption."""
        noise = self.noise[:1].to(self.ordinary[0].device)
        requests = [Request(cond, noise, dose.neurons, dose.factor) for dose in doses for cond in self.ordinary]
        return list(torch.cat(self.sampler.samples(requests)).cpu().split(len(self.ordinary)))

    def costs(self, doses: Sequence[Dose]) -> list[float]:
        """How far each dose moves ordinary captions' samples, as a fraction of the usual distance."""
        if not self.ordinary or not doses:
            return [math.nan] * len(doses)
        moved = [
            (samples - self.untouched).float().square().mean((1, 2, 3)).sqrt() for samples in self._ordinary(doses)
        ]
        return [float(each.mean()) / self.threshold.usual for each in moved]

    @property
    def threshold(self) -> SampleThreshold:
        """Of the sampler."""
        assert self.sampler.threshold is not None
        return self.sampler.threshold

    def agreement(self, samples: torch.Tensor) -> Agreement:
        """Of the samples that detection would make, without the latents."""
        config = self.sampler.config
        return replace(Agreement.of(samples[: config.seeds], config, self.threshold), samples=None)

    def agreeing(self, untouched: torch.Tensor) -> torch.Tensor:
        """(S,) bool: the untouched samples that agree with another one."""
        own = torch.eye(len(untouched), dtype=torch.bool)
        return (_apart(untouched, untouched).masked_fill(own, math.inf) < self.threshold.distance).any(1)

    def point(self, dose: Dose, samples: torch.Tensor, untouched: torch.Tensor) -> DosePoint:
        """Compares each sample with the untouched ones that agree, but for its own seed's."""
        agreeing, count = self.agreeing(untouched), len(samples)
        if not bool(agreeing.any()):
            return DosePoint(dose, 0, count, 1.0)
        own = torch.eye(count, dtype=torch.bool)
        apart = _apart(samples, untouched).masked_fill(own | ~agreeing, math.nan).nanmedian(1).values
        copies = int((apart < self.threshold.distance).sum())
        return DosePoint(dose, copies, count, float(apart.median()) / self.threshold.usual)

    def verified(self, point: DosePoint, samples: torch.Tensor, untouched: torch.Tensor) -> DosePoint:
        """The dose with samples of fresh seeds, compared with all untouched ones that agree."""
        apart = _apart(samples, untouched[self.agreeing(untouched)]).median(1).values
        copies = point.copies + int((apart < self.threshold.distance).sum())
        return replace(point, copies=copies, samples=point.samples + len(samples), fresh=len(samples))


def _apart(samples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """(N, M) root mean square of the difference of each two latents."""
    return torch.cdist(samples.float().flatten(1), others.float().flatten(1)) / samples[0].numel() ** 0.5
