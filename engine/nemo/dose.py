"""The dose: how strongly and how many neurons are blocked, judged by few-step samples, in order of what it costs.

Blocking may change one-step predictions as far as it can and samples still end in the memorized picture. So the found
neurons are multiplied by less and less, then more neurons are blocked, until no sample agrees with the untouched ones.
A dose that leaves no copy but changes ordinary captions too much is weakened until it does not.
The doses are tried on a dozen few-step samples, which are cheap. Where none of them agrees, full samples of fresh seeds
decide: these may still end in the picture, and then the next dose is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..io.charts import curve_picture
from ..network.site import ModuleSite
from ..tracing.fingerprint import width_of
from .few_step_detection import Agreement
from .noise_similarity import Neurons
from .search import Outcome

if TYPE_CHECKING:
    from PIL.Image import Image

FACTORS = (0.0, -0.1, -0.2)
"""What found neurons are multiplied by, one after another."""
PART, PART_FACTORS = 0.25, (-1.0, -2.0)
"""The fraction of the found neurons that the prompt drives furthest from usual, and what these are multiplied by: on
the flow model (eight pictures of two sets that do not ship any more) it leaves no copy at half of the cost of all found
neurons."""
STEP = 0.05
"""Factors of a dose that is weakened since it costs too much are multiples of this."""
FULL = (8, 24)
"""Full samples before the word cured, of seeds that nothing else was sampled at: the latter only if none of the former
agrees. A dose that leaves 10 % copies passes them with a chance of 0.034, one that leaves 5 % with 0.19."""
MOST_COST = 0.2
"""A dose is not taken that costs ordinary captions more, see :mod:`vitrine.engine.nemo.caption_evidence`: below it they
lose 0 to 2.5 points of their attributes, above it 1 to 11 (36 doses for four pictures in usual poses, of a set that
does not ship any more; the order in which doses are tried was chosen on these and on four others)."""


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
        return self.name.replace(" neurons", "").replace("factor ", "").replace("of them", "of found")

    @property
    def count(self) -> int:
        """How many neurons."""
        return sum(len(set(indices)) for indices in self.neurons.values())


UNTOUCHED = Dose("untouched", {}, 1.0)


@dataclass(frozen=True)
class DosePoint:
    """What one dose does.

    Attributes:
        copies, samples: how many few-step samples of the prompt still agree with its untouched ones, of how many.
        full_copies, full: the same of full samples; none where few-step samples agree.
        distance: of the median sample to the untouched ones, as a fraction of the usual distance.
        cost: the fraction that it takes away of what samples of ordinary captions show of these, as the network sees
            it; NaN where that was not measured.
    """

    dose: Dose
    copies: int
    samples: int
    distance: float
    cost: float = math.nan
    full_copies: int = 0
    full: int = 0

    @property
    def affordable(self) -> bool:
        """Whether ordinary captions hardly change, as far as that was measured."""
        return not self.cost > MOST_COST

    @property
    def promising(self) -> bool:
        """Whether no sample agrees with the untouched ones any more, so far, at a cost that is affordable."""
        return not self.copies and not self.full_copies and self.affordable

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
        """The same, of all full samples."""
        return self.promising and self.full == sum(FULL)

    def with_full(self, agreeing: torch.Tensor) -> DosePoint:
        """The same with further full samples, (N,) bool: which of them agree."""
        return replace(self, full_copies=self.full_copies + int(agreeing.sum()), full=self.full + len(agreeing))

    @property
    def left(self) -> float:
        """The fraction of the full samples that agree; of the few-step samples where there are no full ones."""
        return self.full_copies / self.full if self.full else self.copies / self.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files."""
        plain = {"dose": self.dose.name, "neurons": self.dose.count, "factor": self.dose.factor}
        plain |= {"copies": self.copies, "samples": self.samples, "distance": self.distance}
        plain |= {"full_copies": self.full_copies, "full": self.full}
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

    def with_full(self, agreeing: torch.Tensor, rows: int) -> DoseCurve:
        """The same with further full samples of the last dose."""
        points = (*self.points[:-1], self.points[-1].with_full(agreeing))
        return replace(self, points=points, rows=self.rows + rows)

    @property
    def memorized(self) -> bool:
        """Whether untouched samples agree: two full ones, or few-step ones as detection sees it."""
        unsampled = not self.untouched.full
        return bool(self.untouched.copies) and (unsampled or self.untouched.full_copies > 1 or self.before.memorized)

    @property
    def clear(self) -> bool:
        """Whether no sample of the last dose agrees so far, of a prompt whose untouched ones do."""
        return bool(self.points) and self.memorized and self.points[-1].promising

    @property
    def ended(self) -> bool:
        """Whether a dose cures, or there is nothing to cure."""
        return bool(self.points) and (self.points[-1].cures or not self.memorized)

    def following(self, ladder: Sequence[Dose]) -> Dose | None:
        """The next dose of the ladder, none stronger than one that is too strong; or else, that one weakened."""
        tried, strong = [p.dose for p in self.points], [p.dose for p in self.points if p.too_strong]
        at = max((i for i, dose in enumerate(ladder) if dose in tried), default=-1)
        remaining = [
            d for d in ladder[at + 1 :] if not any(d.count >= s.count and d.factor <= s.factor for s in strong)
        ]
        if not remaining and self.points and self.points[-1].too_strong:
            return self.points[-1].weakened
        return remaining[0] if remaining else None

    @property
    def samples(self) -> tuple[Agreement, Agreement]:
        """Agreement of samples without blocking, and at the chosen dose."""
        return self.before, self.after[self.points.index(self.chosen)]

    @property
    def chosen(self) -> DosePoint:
        """The first dose that cures; where none does, the affordable one that leaves the smallest part of copies."""
        affordable = [point for point in self.points if point.affordable] or list(self.points[:1])
        least = min(affordable, key=lambda p: (p.copies / p.samples, p.left, -p.distance))
        return next((p for p in self.points if p.cures), least)

    @property
    def verdict(self) -> str:
        """``not memorized`` where untouched samples do not agree, ``cured``, ``reduced`` or ``not cured``."""
        if not self.memorized:
            return "not memorized"
        if self.chosen.cures:
            return "cured"
        return "reduced" if self.chosen.left < self.untouched.left else "not cured"

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
    moved = "" if math.isnan(cost) else f", ordinary captions' samples show {100 * cost:.0f} % less of them"
    if cost > MOST_COST:
        moved += f", more than {100 * MOST_COST:.0f} %"
    return f"{point['dose']}{size}: {samples_agreeing(point)}{moved}"


def samples_agreeing(point: Mapping[str, Any]) -> str:
    """How many samples still agree, few-step and full ones; from :meth:`DosePoint.to_dict`."""
    full = f", {point['full_copies']} of {point['full']} full ones" if point["full"] else ""
    return f"{point['copies']} of {point['samples']} few-step samples agree{full}"


def dose_picture(curve: DoseCurve) -> Image:
    """Samples that still agree at each dose, against what it costs ordinary captions, or else in the order tried.

    Of full samples; of few-step ones, and so marked, where a dose has no full ones.
    """
    tried = [curve.untouched, *curve.points]
    measured = not any(math.isnan(point.cost) for point in curve.points)
    costs = [0.0, *(100 * point.cost for point in curve.points)] if measured else list(range(len(tried)))
    along = "% less of ordinary captions in their samples" if measured else "doses, in order"
    chosen = curve.points.index(curve.chosen) + 1 if curve.points else 0
    title = f"{curve.verdict}: {curve.chosen.dose.name}, {curve.agreeing}"
    order = sorted(range(len(tried)), key=costs.__getitem__)
    points = [(costs[i], 100 * tried[i].left) for i in order]
    limit = (100 * MOST_COST, "most that a dose may cost") if measured else None
    names = [tried[i].dose.short + ("" if tried[i].full else " (few)") for i in order]
    return curve_picture(points, title, along, "% agree", names, order.index(chosen), limit, (0, 100))


def doses_of(
    backbone: nn.Module, sites: Sequence[ModuleSite], outcome: Outcome, held: Sequence[Mapping[str, Any]] = ()
) -> list[Dose]:
    """What is tried after a search: found neurons and a part of them in turn, all candidates, all of down and mid.

    That is the order of what they cost ordinary captions, more or less: it differs from picture to picture.

    Args:
        sites: the model's value sites.
        held: records of the found neurons, see :func:`~vitrine.engine.nemo.neuron_effects.holdings`.
    """
    candidates = {address: sorted(set(indices)) for address, indices in outcome.initial.items() if indices}
    furthest = sorted(held, key=lambda record: -record["deviations"])
    part: dict[str, list[int]] = {}
    for record in furthest[: math.ceil(PART * len(furthest))]:
        part.setdefault(record["address"], []).append(record["index"])
    whole = [Dose(f"found neurons, factor {factor:g}", outcome.neurons, factor) for factor in FACTORS]
    quarter = [Dose(f"a quarter of them, factor {factor:g}", part, factor) for factor in PART_FACTORS]
    doses = [dose for pair in zip_longest(whole, quarter) for dose in pair if dose is not None]
    doses += [Dose(f"all candidates, factor {factor:g}", candidates, factor) for factor in FACTORS]
    if any(site.address.startswith("up-") for site in sites):
        lower = [site for site in sites if not site.address.startswith("up-")]
        doses.append(Dose("all of down and mid, factor 0", {s.address: range(width_of(backbone, s)) for s in lower}))
    return doses[:1] + [dose for dose in doses[1:] if dose.count]
