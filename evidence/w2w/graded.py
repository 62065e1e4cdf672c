"""Graded sliders: does an attribute rise along five even positions, on people in neither the space nor the tuning?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ...engine.w2w.directions import direction_named, joint_directions, with_directions
from ...engine.w2w.space import WeightSpace
from ...engine.w2w.strengths import POSITIONS, StrengthMap, fit_strengths
from ..portraits.identities import identity_similarity
from .edits import EDITS, WORDS, draw_once, surroundings, with_word
from .world import EXCLUSIVE, LABELS, Studio, labels, people_space, subspace

IN_SPACE, TUNING = 400, 200
"""The first 400 people make the space; the last 200 of them tune its sliders; people from 400 on are measured."""
GRID = 6
"""Strengths at which a slider is read for its map, up to the end that ``EDITS`` names."""
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


@dataclass(frozen=True)
class Graded:
    """One slider at five even positions.

    Attributes:
        probability: (5, M) of the label for each person.
        others: (5,) largest change of any other attribute's distribution, in total variation.
        identity: (5,) mean cosine of identity features to position 0.
    """

    probability: torch.Tensor
    others: list[float]
    identity: list[float]

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

    def described(self) -> str:
        """One line of the table."""
        step, low, high = self.largest_step()
        shown = " ".join(f"{v:.2f}" for v in self.mean)
        return (
            f"{shown}, largest step {step:.2f} ({low:.2f} to {high:.2f}), of single pictures {self.single:.2f}, "
            f"others {max(self.others):.3f}, identity {self.identity[-1]:.3f}"
        )


@dataclass(frozen=True)
class Sitting:
    """People who lack an attribute, as flat weights (M, D), and what is drawn of them with one seed and prompt each.

    Edits act from timestep ``start`` on.
    """

    studio: Studio
    label: str
    weights: torch.Tensor
    steps: int
    start: float = 1000.0

    @classmethod
    def open(cls, studio: Studio, label: str, people: range, count: int, steps: int) -> Sitting:
        """``count`` of the shipped people numbered ``people``, with all of their own weights, in the space or not."""
        return cls.of(studio, people_space(), label, people, count, steps, EDITS.get(label, (4.5, 1000.0))[1])

    @classmethod
    def of(
        cls, studio: Studio, shipped: WeightSpace, label: str, people: range, count: int, steps: int,
        start: float = 1000.0,
    ) -> Sitting:  # fmt: skip
        """As :meth:`open`, of another space's people."""
        table = labels(shipped.names)
        lacking = table[label] == 0
        if LABELS[label][0] == "hair_color":
            lacking &= table["bald"] == 0
        who = [i for i in people if bool(lacking[i])][:count]
        return cls(studio, label, shipped.decode(shipped.coefficients[who]), steps, start)

    @cached_property
    def unmoved(self) -> torch.Tensor:
        """Their pictures before any edit."""
        return draw_once(self.studio, self.weights, surroundings(len(self.weights)), steps=self.steps)

    def chance(self) -> float:
        """What another seed changes in others without any edit: as far as they change by themselves."""
        again = draw_once(
            self.studio, self.weights, surroundings(len(self.weights)), steps=self.steps, first_seed=ANOTHER
        )
        return self.graded(lambda draw: again if draw else self.unmoved, (0.0, 1.0)).others[1]

    def moved(self, strength: float) -> torch.Tensor:
        """Their pictures, edited by the space's direction from the label's usual timestep on."""
        space = self.studio.space
        assert isinstance(space, WeightSpace)
        prompts = surroundings(len(self.weights))
        if strength == 0:
            return self.unmoved
        # weights2weights, section 3.3: theta + a n, also for people who are not in the space
        change = space.scale * (strength * direction_named(space, self.label) @ space.components.float())
        return draw_once(self.studio, self.weights, prompts, self.weights + change, self.start, self.steps)

    def worded(self, weight: float) -> torch.Tensor:
        """Their pictures with text states between those of the prompt without (0) and with (1) the attribute's word."""
        if weight == 0:
            return self.unmoved
        prompts = surroundings(len(self.weights))
        with torch.no_grad():
            plain = self.studio.portraits.encode(prompts)
            full = self.studio.portraits.encode([with_word(p, WORDS[self.label]) for p in prompts])
        return draw_once(self.studio, self.weights, plain.lerp(full, weight), steps=self.steps)

    def fitted(self) -> tuple[StrengthMap, StrengthMap]:
        """The slider's map from these people: as far as it rises, and only until others have changed by ``OTHERS``."""
        top, start = EDITS.get(self.label, (4.5, 1000.0))
        strengths = [top * i / GRID for i in range(GRID + 1)]
        seen = self.graded(self.moved, strengths)
        short = fit_strengths(strengths, seen.mean, start, others=seen.others, limit=OTHERS)
        return fit_strengths(strengths, seen.mean, start), short

    def graded(self, draw: Callable[[float], torch.Tensor], values: Sequence[float]) -> Graded:
        """What ``draw`` shows at each value; the first is the picture before any edit."""
        studio, edited = self.studio, LABELS[self.label][0]
        readings = [studio.read(draw(v)) for v in values]
        features, base = readings[0]
        names = [n for n in base if n != edited and not (edited == "hair" and n == "hair_color")]
        others = [
            max(float((read[n].mean((0, 1)) - base[n].mean((0, 1))).abs().sum() / 2) for n in names)
            for _, read in readings
        ]
        identity = [float(identity_similarity(f, features).mean()) for f, _ in readings]
        probability = torch.stack([studio.likelihood(read, self.label).mean(1) for _, read in readings])
        return Graded(probability, others, identity)


@dataclass(frozen=True)
class Comparison:
    """One label on people of no space: even strengths, the calibrated maps, and the weighted word.

    Attributes:
        linear: strengths up to the end that ``EDITS`` names.
        calibrated: the map to where the attribute rises no more.
        short: the map to where others begin to change.
        worded: the attribute's word in the prompt.
        fitted, shortened: the two maps.
        chance: change of others that another seed brings without any edit.
    """

    linear: Graded
    calibrated: Graded
    short: Graded
    worded: Graded
    fitted: StrengthMap
    shortened: StrengthMap
    chance: float

    @classmethod
    def measure(cls, studio: Studio, label: str, people: int, steps: int) -> Comparison:
        """The map is fitted on as many of the tuning people as are measured of the others."""
        tuning = Sitting.open(studio, label, range(IN_SPACE - TUNING, IN_SPACE), people, steps)
        fitted, shortened = tuning.fitted()
        sitting = Sitting.open(studio, label, range(IN_SPACE, people_space().count), people, steps)
        even = [i / (POSITIONS - 1) for i in range(POSITIONS)]
        top = EDITS.get(label, (4.5, 1000.0))[0]
        linear = sitting.graded(sitting.moved, [top * v for v in even])
        calibrated = sitting.graded(lambda v: sitting.moved(fitted.at(v)), even)
        same = shortened.strengths == fitted.strengths
        short = calibrated if same else sitting.graded(lambda v: sitting.moved(shortened.at(v)), even)
        worded = sitting.graded(sitting.worded, even)
        return cls(linear, calibrated, short, worded, fitted, shortened, sitting.chance())

    def holds(self, slider: Graded, tolerance: float = 0.10) -> bool:
        """Even, others within ``tolerance``, and identity no more than 0.02 below that of even strengths."""
        kept = slider.identity[-1] >= self.linear.identity[-1] - 0.02
        return slider.even and max(slider.others) <= tolerance and kept

    def described(self) -> dict[str, str]:
        """The label's rows of the table."""
        whole, short = (", ".join(f"{s:.2f}" for s in m.strengths) for m in (self.fitted, self.shortened))
        return {
            "even strengths": self.linear.described(),
            f"calibrated ({whole})": self.calibrated.described(),
            f"calibrated until others change ({short})": self.short.described(),
            "word in the prompt, weighted": self.worded.described(),
            "others without any edit, by another seed": f"{self.chance:.3f}",
        }
