"""Graded sliders: does an attribute rise along five even positions, on people in neither the space nor the tuning?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ...engine.w2w.edit.even_strengths import LEAST_RISE, POSITIONS, StrengthMap, fit_strengths
from ...engine.w2w.space.directions import direction_named, joint_directions, with_directions
from ...engine.w2w.space.space import WeightSpace
from ..portraits.identities import identity_similarity
from .drawing import WORDS, draw_once, with_word
from .measures import side_effects
from .pair_sliders import lacking
from .people import EXCLUSIVE, Studio, labels, people_space, subspace

IN_SPACE = 400
"""Number of people, from the first, who make the space."""
TUNED_ON, MEASURED = range(200, IN_SPACE), range(IN_SPACE, 520)
"""People who tune sliders: from when they act, where they end, their maps; and people of no space, who are measured."""
STARTS = (1000.0, 850.0, 700.0)
"""Timesteps from which an edit may act. The official code edits late too."""
GRID, FAR = 6, 4.5
"""Strengths at which a slider is read for its map, and the largest of them."""
MANY = 80
"""At most this number of the measured people see what counts."""
FARTHEST, ENOUGH = 1.25, 0.9
"""A trained change is read up to this many times itself; a slider ends where it has risen by this share of the most."""
ANOTHER = 10_000
"""Seeds of pictures that show what chance alone changes begin here."""
OTHERS = 0.08
"""Change of other attributes on the tuning people at which a short slider ends; 0.10 are allowed on those measured."""


@lru_cache(maxsize=1)
def smaller_space() -> WeightSpace:
    """The space of the first ``IN_SPACE`` people alone, with directions from their labels."""
    return space_of_first(people_space(), IN_SPACE)


def space_of_first(whole: WeightSpace, count: int) -> WeightSpace:
    """The space of the first ``count`` people of a space alone, with directions from their labels."""
    space = subspace(whole, count)
    return with_directions(space, joint_directions(space, labels(space.names), EXCLUSIVE))


HEAD = ("slider", "five positions", "largest step", "of single pictures", "others", "identity", "people")
"""Columns of a slider's table."""


@dataclass(frozen=True)
class Graded:
    """One slider at five even positions.

    Attributes:
        probability: (5, M) of the label for each person.
        shifts: other attribute -> (5, M, values) change of each person's distribution; NaN as in ``side_effects``.
        likeness: (5, M) cosine of each person's identity features to position 0.
    """

    probability: torch.Tensor
    shifts: Mapping[str, torch.Tensor]
    likeness: torch.Tensor

    @property
    def others(self) -> list[float]:
        """(5,) largest change of any other attribute's distribution over all people, in total variation."""
        return torch.stack([v.nanmean(1).abs().sum(1) / 2 for v in self.shifts.values()]).amax(0).tolist()

    @property
    def identity(self) -> list[float]:
        """(5,) mean over people."""
        return self.likeness.mean(1).tolist()

    def first(self, count: int) -> Graded:
        """Of the first people alone, who sit under the same seeds and prompts however many others there are."""
        shifts = {name: v[:, :count] for name, v in self.shifts.items()}
        return Graded(self.probability[:, :count], shifts, self.likeness[:, :count])

    def most_others(self, resamples: int = 1000) -> tuple[float, float, float, str]:
        """The largest of ``others``, its 95 % interval over people (percentile bootstrap), and which attribute it is.

        The largest of several absolute means is above 0 by chance alone, the more so in resamples: compare
        ``Sitting.chance`` of as many people.
        """
        people = self.probability.shape[1]
        drawn = torch.randint(people, (resamples, people), generator=torch.Generator().manual_seed(0))
        weights = torch.zeros(resamples, people).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))
        each = [_weighted(weights, v).abs().sum(2) / 2 for v in self.shifts.values()]
        low, high = torch.quantile(torch.stack(each).amax((0, 2)), torch.tensor([0.025, 0.975])).tolist()
        most = {name: float((v.nanmean(1).abs().sum(1) / 2).max()) for name, v in self.shifts.items()}
        name = max(most, key=most.__getitem__)
        return most[name], low, high, name

    @property
    def mean(self) -> list[float]:
        """(5,) over people."""
        return self.probability.mean(1).tolist()

    @property
    def steps(self) -> list[float]:
        """(4,) rises of the mean from each position to the next."""
        return self.probability.mean(1).diff().tolist()

    def largest_step(self, resamples: int = 1000) -> tuple[float, float, float]:
        """The largest rise of the mean, and its 95 % interval over people (percentile bootstrap)."""
        people = self.probability.shape[1]
        drawn = torch.randint(people, (resamples, people), generator=torch.Generator().manual_seed(0))
        each = self.probability[:, drawn].mean(2).diff(dim=0).amax(0)
        low, high = torch.quantile(each, torch.tensor([0.025, 0.975])).tolist()
        return max(self.steps), low, high

    @property
    def single(self) -> float:
        """The largest rise of a single person's picture, mean over people: 1 is a switch."""
        return float(self.probability.diff(dim=0).amax(0).mean())

    @property
    def even(self) -> bool:
        """Rises by 30 points or more, never falls by more than 2, and has no step above 0.4."""
        return sum(self.steps) >= 0.3 and min(self.steps) >= -0.02 and max(self.steps) <= 0.4

    def row(self) -> tuple[Any, ...]:
        """Of a table with :data:`HEAD`, but for the slider's name."""
        step, low, high = self.largest_step()
        most, least, last, name = self.most_others()
        return (
            " ".join(f"{v:.2f}" for v in self.mean), f"{step:.2f} ({low:.2f} to {high:.2f})", round(self.single, 2),
            f"{most:.3f} ({least:.3f} to {last:.3f}; {name})", round(self.identity[-1], 3), self.probability.shape[1],
        )  # fmt: skip


def _weighted(share: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(R, S, V) means over people, weighted by (R, M) shares, of (S, M, V) that are NaN for some people."""
    counts = (~values[0].isnan().any(1)).float()
    return torch.einsum("rp,spv->rsv", share, values.nan_to_num()) / (share @ counts).clamp_min(1)[:, None, None]


@dataclass(frozen=True)
class Tuned:
    """A slider as the tuning people see it.

    Attributes:
        whole: the map as far as the attribute rises (of a trained change: as far as ``ENOUGH`` of that).
        short: only until others have changed by ``OTHERS``.
        rise, others: of the reading up to the end of ``whole``, and the largest change of others on the way.
        change: (D,) where the slider is not the space's own direction.
    """

    whole: StrengthMap
    short: StrengthMap
    rise: float
    others: float
    change: torch.Tensor | None = None

    def or_better(self, other: Tuned | None) -> Tuned:
        """The other one if it rises far enough and changes less besides the attribute (or this one does not rise)."""
        if other is None or other.rise < LEAST_RISE:
            return self
        return other if other.others < self.others or self.rise < LEAST_RISE else self


@dataclass(frozen=True)
class Sitting:
    """People who lack an attribute, as flat weights (M, D), and their samples with one seed and prompt each."""

    studio: Studio
    label: str
    weights: torch.Tensor
    steps: int

    @classmethod
    def open(cls, studio: Studio, label: str, people: range, count: int, steps: int) -> Sitting:
        """``count`` of the shipped people numbered ``people``, with all of their own weights, in the space or not."""
        return cls.of(studio, people_space(), label, people, count, steps)

    @classmethod
    def of(
        cls, studio: Studio, shipped: WeightSpace, label: str, people: range, count: int, steps: int
    ) -> Sitting:  # fmt: skip
        """As :meth:`open`, of another space's people."""
        lacks = lacking(shipped.names, label)
        who = [i for i in people if i < shipped.count and bool(lacks[i])][:count]
        return cls(studio, label, shipped.decode(shipped.coefficients[who]), steps)

    @cached_property
    def unmoved(self) -> torch.Tensor:
        """Their pictures before any edit."""
        return draw_once(self.studio, self.weights, self.studio.surroundings(len(self.weights)), steps=self.steps)

    def chance(self) -> float:
        """What another seed changes in others without any edit: as far as they change by themselves."""
        prompts = self.studio.surroundings(len(self.weights))
        again = draw_once(self.studio, self.weights, prompts, steps=self.steps, first_seed=ANOTHER)
        return self.graded(lambda draw: again if draw else self.unmoved, (0.0, 1.0)).others[1]

    def moved(self, strength: float, change: torch.Tensor | None = None, start: float = 1000.0) -> torch.Tensor:
        """Their pictures, edited by the space's direction, or a (D,) change, from timestep ``start`` on."""
        space = self.studio.space
        assert isinstance(space, WeightSpace)
        prompts = self.studio.surroundings(len(self.weights))
        if strength == 0:
            return self.unmoved
        # weights2weights, section 3.3: theta + a n, also for people who are not in the space
        if change is None:
            change = space.scale * (direction_named(space, self.label) @ space.components.float())
        edited = self.weights + strength * change
        return draw_once(self.studio, self.weights, prompts, edited, start, self.steps)

    def worded(self, weight: float) -> torch.Tensor:
        """Their pictures with text states between those of the prompt without (0) and with (1) the attribute's word."""
        if weight == 0:
            return self.unmoved
        prompts = self.studio.surroundings(len(self.weights))
        with torch.no_grad():
            plain = self.studio.portraits.encode(prompts)
            full = self.studio.portraits.encode([with_word(p, WORDS[self.label]) for p in prompts])
        return draw_once(self.studio, self.weights, plain.lerp(full, weight), steps=self.steps)

    def latest_start(self, strength: float, change: torch.Tensor | None = None) -> float:
        """Of ``STARTS`` the latest from which the attribute comes nearly as far (``ENOUGH``) as from any.

        The later an edit begins, the more of the picture it keeps.
        """
        read, likelihood = self.studio.read, self.studio.likelihood
        shown = [float(likelihood(read(self.moved(strength, change, t))[1], self.label).mean()) for t in STARTS]
        unmoved = float(likelihood(read(self.unmoved)[1], self.label).mean())
        enough = min(max(shown), unmoved + ENOUGH * (max(shown) - unmoved))  # their maximum where none rises
        return min(t for t, fraction in zip(STARTS, shown, strict=True) if fraction >= enough)

    def tuned(self, change: torch.Tensor | None = None) -> Tuned:
        """What these people make of the space's direction, or of a trained (D,) change."""
        far = FAR if change is None else FARTHEST
        start, strengths = self.latest_start(far, change), [far * i / GRID for i in range(GRID + 1)]
        seen = self.graded(lambda s: self.moved(s, change, start), strengths)
        mean = seen.mean
        enough = ENOUGH * (max(mean) - mean[0])
        end = next((i for i in range(1, GRID + 1) if mean[i] - mean[0] >= enough), GRID)
        whole = fit_strengths(strengths[: end + 1], mean[: end + 1], start)
        short = fit_strengths(strengths, mean, start, others=seen.others, limit=OTHERS) if change is None else whole
        return Tuned(whole, short, mean[end] - mean[0], max(seen.others[: end + 1]), change)

    def graded(self, draw: Callable[[float], torch.Tensor], values: Sequence[float]) -> Graded:
        """What ``draw`` shows at each value; the first is the picture before any edit."""
        studio, edited = self.studio, self.studio.labels[self.label][0]
        readings = [studio.read(draw(v)) for v in values]
        features, base = readings[0]
        changes = [side_effects(base, read, edited) for _, read in readings]
        shifts = {n: torch.stack([change[n].mean(1) for change in changes]) for n in changes[0]}
        likeness = torch.stack([identity_similarity(f, features).mean(1) for f, _ in readings])
        probability = torch.stack([studio.likelihood(read, self.label).mean(1) for _, read in readings])
        return Graded(probability, shifts, likeness)


@dataclass(frozen=True)
class Comparison:
    """One label on people of no space: even strengths, the calibrated maps, and the weighted word.

    Attributes:
        linear: strengths up to where the map ends.
        calibrated: the map to where the attribute rises no more.
        short: the map to where others begin to change.
        worded: the attribute's word in the prompt.
        pairs: the map of a direction trained from pairs, where there is one.
        tuned, paired: the maps, and what the tuning people saw of them.
        chance: change of others that another seed brings without any edit, to as many people as ``calibrated`` shows.
    """

    linear: Graded
    calibrated: Graded
    short: Graded
    worded: Graded
    pairs: Graded | None
    tuned: Tuned
    paired: Tuned | None
    chance: float

    @classmethod
    def measure(
        cls, studio: Studio, label: str, people: int, steps: int, many: int | None = None,
        change: torch.Tensor | None = None,
    ) -> Comparison:  # fmt: skip
        """Maps are fitted on ``people`` of the tuning people.

        Args:
            people: of those measured, see even strengths, the short map and the word.
            many: of those measured, see the maps; the first ``people`` are the same.
            change: (D,) of a direction trained from pairs.
        """
        tuning = Sitting.open(studio, label, TUNED_ON, people, steps)
        tuned, paired = tuning.tuned(), None if change is None else tuning.tuned(change)
        few = Sitting.open(studio, label, MEASURED, people, steps)
        all_ = Sitting.open(studio, label, MEASURED, many or people, steps)
        even = [i / (POSITIONS - 1) for i in range(POSITIONS)]
        end, start = tuned.whole.strengths[-1], tuned.whole.start
        linear = few.graded(lambda v: few.moved(end * v, start=start), even)
        calibrated = all_.graded(lambda v: all_.moved(tuned.whole.at(v), start=start), even)
        same = tuned.short.strengths == tuned.whole.strengths
        short = calibrated.first(people)
        if not same:
            short = few.graded(lambda v: few.moved(tuned.short.at(v), start=start), even)
        pairs = None
        if paired is not None:
            points = paired.whole
            pairs = all_.graded(lambda v: all_.moved(points.at(v), change, points.start), even)
        worded = few.graded(few.worded, even)
        return cls(linear, calibrated, short, worded, pairs, tuned, paired, all_.chance())

    @property
    def chosen(self) -> Tuned:
        """Of the two directions the one that the tuning people preferred."""
        return self.tuned.or_better(self.paired)

    @property
    def best(self) -> Graded:
        """What that one shows."""
        return self.calibrated if self.pairs is None or self.chosen is self.tuned else self.pairs

    def holds(self, slider: Graded, tolerance: float = 0.10) -> bool:
        """Even, others within ``tolerance``, identity no more than 0.02 below even strengths' on the same people."""
        people = self.linear.probability.shape[1]
        kept = slider.first(people).identity[-1] >= self.linear.identity[-1] - 0.02
        return slider.even and max(slider.others) <= tolerance and kept

    def rows(self) -> tuple[tuple[Any, ...], ...]:
        """The label's rows of a table with :data:`HEAD`."""
        whole, short = (_said(m) for m in (self.tuned.whole, self.tuned.short))
        ways = {"even strengths": self.linear, f"calibrated ({whole})": self.calibrated}
        ways[f"calibrated until others change ({short})"] = self.short
        if self.pairs is not None and self.paired is not None:
            chosen = "preferred" if self.best is self.pairs else "not preferred"
            ways[f"trained from pairs, calibrated ({_said(self.paired.whole)}), {chosen} by the tuning people"] = (
                self.pairs
            )
        ways["word in the prompt, weighted"] = self.worded
        chance = ("others without any edit, by another seed", None, None, None, f"{self.chance:.3f}", None, None)
        return (*((name, *way.row()) for name, way in ways.items()), chance)


def _said(points: StrengthMap) -> str:
    return f"{', '.join(f'{s:.2f}' for s in points.strengths)} from t = {points.start:g}"
