"""Graded sliders: does an attribute rise along five even positions, on people in neither the space nor the tuning?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ...engine.w2w.space.directions import direction_named, joint_directions, with_directions
from ...engine.w2w.space.space import WeightSpace
from ..portraits.identities import identity_similarity
from .drawing import WORDS, draw_once, with_word
from .even_strengths import StrengthMap, fit_strengths
from .measures import side_effects
from .people import EXCLUSIVE, Studio, labels, lacking, people_space, subspace

IN_SPACE = 400
"""Number of people, from the first, who make the space."""
TUNED_ON, MEASURED = range(200, IN_SPACE), range(IN_SPACE, 520)
"""People who tune sliders: from when they act, where they end, their maps; and people of no space, who are measured."""
STARTS = (1000.0, 850.0, 700.0)
"""Timesteps from which an edit may act. The official code edits late too."""
STRENGTHS_READ, LARGEST_STRENGTH = 6, 4.5
"""Strengths above 0 at which a slider is read for its map, and the largest of them."""
SHARE_OF_RISE = 0.9
"""A slider ends, and may begin late, where it has risen by this share of the most."""


@lru_cache(maxsize=1)
def smaller_space() -> WeightSpace:
    """The space of the first ``IN_SPACE`` people alone, with directions from their labels."""
    space = subspace(people_space(), IN_SPACE)
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

    def most_others(self, resamples: int = 1000) -> tuple[float, float, float, str]:
        """The largest of ``others``, its 95 % interval over people (percentile bootstrap), and which attribute it is.

        The largest of several absolute means is above 0 by chance alone, the more so in resamples: compare
        what chance alone changes in as many people.
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
            " ".join(f"{v:.2f}" for v in self.mean),
            f"{step:.2f} ({low:.2f} to {high:.2f})",
            round(self.single, 2),
            f"{most:.3f} ({least:.3f} to {last:.3f}; {name})",
            round(self.identity[-1], 3),
            self.probability.shape[1],
        )


def _weighted(share: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(R, S, V) means over people, weighted by (R, M) shares, of (S, M, V) that are NaN for some people."""
    counts = (~values[0].isnan().any(1)).float()
    return torch.einsum("rp,spv->rsv", share, values.nan_to_num()) / (share @ counts).clamp_min(1)[:, None, None]


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
        shipped = people_space()
        lacks = lacking(shipped.names, label)
        who = [i for i in people if bool(lacks[i])][:count]
        return cls(studio, label, shipped.decode(shipped.coefficients[who]), steps)

    @cached_property
    def unmoved(self) -> torch.Tensor:
        """Their pictures before any edit."""
        return draw_once(self.studio, self.weights, self.studio.surroundings(len(self.weights)), steps=self.steps)

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

    def latest_start(self) -> float:
        """Of ``STARTS`` the latest from which the attribute comes nearly as far (``SHARE_OF_RISE``) as from any.

        The later an edit begins, the more of the picture it keeps.
        """
        read, likelihood = self.studio.read, self.studio.likelihood
        moved = [self.moved(LARGEST_STRENGTH, start=t) for t in STARTS]
        shown = [float(likelihood(read(pictures)[1], self.label).mean()) for pictures in moved]
        unmoved = float(likelihood(read(self.unmoved)[1], self.label).mean())
        enough = min(max(shown), unmoved + SHARE_OF_RISE * (max(shown) - unmoved))  # their maximum where none rises
        return min(t for t, fraction in zip(STARTS, shown, strict=True) if fraction >= enough)

    def tuned(self) -> StrengthMap:
        """The map of the space's direction, as far as the attribute rises for these people."""
        start = self.latest_start()
        strengths = [LARGEST_STRENGTH * i / STRENGTHS_READ for i in range(STRENGTHS_READ + 1)]
        mean = self.graded(lambda s: self.moved(s, start=start), strengths).mean
        enough = SHARE_OF_RISE * (max(mean) - mean[0])
        end = next((i for i in range(1, STRENGTHS_READ + 1) if mean[i] - mean[0] >= enough), STRENGTHS_READ)
        return fit_strengths(strengths[: end + 1], mean[: end + 1], start)

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
