"""Samples decide which dose is taken: few-step ones, of the prompt and of ordinary captions, and then full ones.

A full sample agrees that is nearer to the untouched sample in the middle than a third of the distance that full samples
of ordinary captions have to it, which is what makes a copy (Gu et al. 2023).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..diffusion.noise import seeded_noise
from ..errors import refuse
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import FULL_STEPS
from .blocked_copies import THIRD
from .caption_evidence import NOISES, caption_evidence
from .dose import FULL, UNTOUCHED, Dose, DoseCurve, DosePoint, doses_of
from .few_step_detection import Agreement, FewStepSampler
from .noise_similarity import Request
from .search import Outcome

SAMPLES, REFERENCES, UNRELATED = 12, 4, 4
"""Few-step samples of the prompt at each dose, from the calibration's first seed on; full samples of the untouched
prompt; and of ordinary captions."""


@torch.no_grad()
def escalate(
    sampler: FewStepSampler,
    conds: Sequence[Condition],
    outcomes: Sequence[tuple[Outcome, Sequence[Mapping[str, Any]]]],
    shape: tuple[int, int, int],
    steps: int = FULL_STEPS,
    most_rows: Sequence[int] | None = None,
    progress: Progress = silent,
) -> list[DoseCurve]:
    """Try doses for each prompt until samples no longer agree with its untouched ones; all prompts together.

    Args:
        sampler: with a threshold; with ordinary captions and the empty condition where the cost shall be measured.
        conds, outcomes: of each prompt: its condition, one row, and what its search ended with, with the records of the
            neurons.
        shape: (C, h, w) of the latents.
        steps: of the full samples.
        most_rows: UNet evaluations for each prompt, beyond which no further dose is tried; always enough for one dose
            with all full samples after four others.
        progress: counts UNet evaluations, of as many as may be spent.
    """
    judge = _Judge(sampler, shape, steps, progress)
    ladders = [doses_of(sampler.denoiser.backbone, sampler.sites, *each) for each in outcomes]
    first, each = judge.first_rows(len(conds)), judge.dose_rows + judge.full_rows
    least = first + 4 * (judge.dose_rows + judge.full_each * FULL[0]) + each
    asked = [max(rows, least) for rows in most_rows or [sys.maxsize] * len(conds)]
    most = [min(rows, first + len(ladder) * each) for rows, ladder in zip(asked, ladders, strict=True)]
    judge.expected = sum(most)
    curves, references = judge.begin(conds)

    def following(i: int) -> Dose | None:
        room = curves[i].rows + each <= asked[i]
        return curves[i].following(ladders[i]) if room and not curves[i].ended else None

    while waiting := {i: dose for i in range(len(curves)) if (dose := following(i)) is not None}:
        tried = [(curves[i], references[i], conds[i], dose) for i, dose in waiting.items()]
        for i, curve in zip(waiting, judge.tried(tried), strict=True):
            curves[i] = curve
        judge.done = sum(most[i] if curve.ended else curve.rows for i, curve in enumerate(curves))
    progress(max(1, judge.expected), max(1, judge.expected), None)
    return curves


@torch.no_grad()
def changed_prompt(
    sampler: FewStepSampler,
    cond: Condition,
    changed: Condition,
    shape: tuple[int, int, int],
    steps: int = FULL_STEPS,
    progress: Progress = silent,
) -> DosePoint:
    """How many samples of a changed condition still agree with those of the prompt's own; nothing is blocked."""
    judge = _Judge(sampler, shape, steps, progress, priced=False)
    judge.expected = judge.first_rows(1) + judge.dose_rows + judge.full_rows
    (curve,), (reference,) = judge.begin([cond])
    (curve,) = judge.tried([(curve, reference, changed, Dose("embedding adjusted", {}, 1.0))])
    progress(judge.expected, judge.expected, None)
    return replace(curve.points[-1], cost=0.0)


@dataclass(frozen=True)
class _Reference:
    """What samples of a prompt are compared with.

    Attributes:
        few: (S, C, h, w) untouched few-step samples.
        picture: (1, C, h, w) the untouched full sample that is nearest to the others; None: there is no full sample.
        level: a full sample agrees that is nearer to it.
    """

    few: torch.Tensor
    picture: torch.Tensor | None = None
    level: float = 0.0

    @classmethod
    def of(cls, few: torch.Tensor, full: torch.Tensor, unrelated: torch.Tensor) -> _Reference:
        """From full samples of the prompt and of other captions."""
        picture = full[_apart(full, full).median(1).values.argmin()][None]
        return cls(few, picture, THIRD * float(_apart(unrelated, picture).median()))

    def agreeing(self, full: torch.Tensor) -> torch.Tensor:
        """(N,) bool: which full samples agree."""
        assert self.picture is not None
        return _apart(full, self.picture)[:, 0] < self.level


Tried = tuple[DoseCurve, _Reference, Condition, Dose]
"""A prompt's curve so far, what its samples are compared with, and the next dose."""


@dataclass
class _Judge:
    """Samples prompts and ordinary captions at a dose, and compares both with what they are untouched.

    Attributes:
        steps: of the full samples.
        priced: measures what a dose costs ordinary captions.
        done, expected: UNet evaluations, for ``progress``.
    """

    sampler: FewStepSampler
    shape: tuple[int, int, int]
    steps: int
    progress: Progress = silent
    priced: bool = True
    done: int = 0
    expected: int = 1

    def __post_init__(self) -> None:
        config, ordinary = self.sampler.config, list(self.sampler.ordinary)
        if self.sampler.threshold is None:
            raise refuse("sampler", "without a threshold", "one measured on this model", "calibrate")
        self.threshold, self.first_seed = self.sampler.threshold, config.first_seed
        self.few_each, self.few = config.rows // config.seeds, max(SAMPLES, config.seeds)
        self.full_each = self.few_each // config.steps * self.steps
        self.ordinary = ordinary if self.priced else []
        empty = [] if self.sampler.empty is None else [self.sampler.empty]
        self.unrelated = ordinary[:UNRELATED] or empty * UNRELATED
        self.evidence_rows = 2 * NOISES * len(self.ordinary) if empty else 0

    def first_rows(self, prompts: int) -> int:
        """UNet evaluations of a prompt that copies before the first dose, with its part of what all prompts share."""
        shared = self.few_each * len(self.ordinary) + self.evidence_rows + self.full_each * len(self.unrelated)
        return self.few_each * self.few + self.full_each * REFERENCES + shared // max(1, prompts)

    @property
    def dose_rows(self) -> int:
        """UNet evaluations of a dose's few-step samples, of the prompt and of ordinary captions."""
        return self.few_each * (self.few + len(self.ordinary)) + self.evidence_rows

    @property
    def full_rows(self) -> int:
        """UNet evaluations of a dose's full samples."""
        return self.full_each * sum(FULL)

    def begin(self, conds: Sequence[Condition]) -> tuple[list[DoseCurve], list[_Reference]]:
        """Each prompt's curve without a dose, and what its samples are compared with."""
        few = self._samples([(cond, UNTOUCHED) for cond in conds], self.few)
        (self.usual,) = self._evidence([UNTOUCHED]) if self.evidence_rows else (math.nan,)
        curves = [DoseCurve(self._point(UNTOUCHED, each, each), self._agreement(each)) for each in few]
        references = [_Reference(each) for each in few]
        copying = [i for i, curve in enumerate(curves) if curve.untouched.copies]
        if copying and self.unrelated:
            unrelated = torch.cat(self._samples([(cond, UNTOUCHED) for cond in self.unrelated], 1, self.steps))
            full = self._samples([(conds[i], UNTOUCHED) for i in copying], REFERENCES, self.steps)
            for i, samples in zip(copying, full, strict=True):
                references[i] = _Reference.of(few[i], samples, unrelated)
                agreeing = references[i].agreeing(samples)
                curves[i] = replace(curves[i], untouched=curves[i].untouched.with_full(agreeing))
        return [replace(curve, rows=self.done // len(curves)) for curve in curves], references

    def tried(self, prompts: Sequence[Tried]) -> list[DoseCurve]:
        """The curves with one more dose, with its full samples where no few-step sample agrees."""
        few = self._samples([(cond, dose) for _, _, cond, dose in prompts], self.few)
        costs = self._costs([dose for *_, dose in prompts])
        curves = []
        for (curve, reference, _, dose), samples, cost in zip(prompts, few, costs, strict=True):
            point = replace(self._point(dose, samples, reference.few), cost=cost)
            curves.append(curve.with_point(point, self._agreement(samples), self.dose_rows))
        for count in FULL:
            clear = [i for i, curve in enumerate(curves) if curve.clear and prompts[i][1].picture is not None]
            full = self._samples([prompts[i][2:] for i in clear], count, self.steps)
            for i, samples in zip(clear, full, strict=True):
                curves[i] = curves[i].with_full(prompts[i][1].agreeing(samples), count * self.full_each)
        return curves

    def _samples(
        self, prompts: Sequence[tuple[Condition, Dose]], count: int, steps: int | None = None
    ) -> list[torch.Tensor]:
        """(count, C, h, w) latents of each prompt; full samples of ``steps`` steps are each of a seed of its own."""
        if not prompts:
            return []
        first = self.sampler.config.first_seed
        if steps is not None:
            first, self.first_seed = self.first_seed + self.few, self.first_seed + count
        noise = seeded_noise(range(first, first + count), self.shape).to(prompts[0][0].device)
        requests = [Request(cond, noise, dose.neurons, dose.factor) for cond, dose in prompts]
        return [samples.cpu() for samples in self.sampler.samples(requests, steps, self._counted)]

    def _counted(self, rows: int) -> None:
        self.done += rows
        self.progress(min(self.done, self.expected), self.expected, None)

    def _evidence(self, doses: Sequence[Dose]) -> list[float]:
        """What the untouched network sees of ordinary captions in their few-step samples at each dose."""
        requests = [(cond, dose) for dose in doses for cond in self.ordinary]
        latents = torch.cat(self._samples(requests, 1))
        empty = self.sampler.empty
        assert empty is not None
        captions = [cond for cond, _ in requests]
        seen = caption_evidence(self.sampler.denoiser, latents, captions, empty, self.sampler.rows, self._counted)
        return [float(each.mean()) for each in seen.split(len(self.ordinary))]

    def _costs(self, doses: Sequence[Dose]) -> list[float]:
        """The fraction of that which each dose takes away; NaN where an untouched sample shows nothing of a caption."""
        if not self.priced or not doses:
            return [0.0] * len(doses)
        if not self.usual > 0:
            return [math.nan] * len(doses)
        return [1 - seen / self.usual for seen in self._evidence(doses)]

    def _agreement(self, samples: torch.Tensor) -> Agreement:
        """Of the samples that detection would make, without the latents."""
        config = self.sampler.config
        return replace(Agreement.of(samples[: config.seeds], config, self.threshold), samples=None)

    def _point(self, dose: Dose, samples: torch.Tensor, untouched: torch.Tensor) -> DosePoint:
        """Compares each few-step sample with the untouched ones that agree, but for its own seed's."""
        own, count = torch.eye(len(samples), dtype=torch.bool), len(samples)
        apart = _apart(untouched, untouched).masked_fill(own, math.inf)
        agreeing = (apart < self.threshold.distance).any(1)
        if not bool(agreeing.any()):
            return DosePoint(dose, 0, count, 1.0)
        apart = _apart(samples, untouched).masked_fill(own | ~agreeing, math.nan).nanmedian(1).values
        copies = int((apart < self.threshold.distance).sum())
        return DosePoint(dose, copies, count, float(apart.median()) / self.threshold.usual)


def _apart(samples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """(N, M) root mean square of the difference of each two latents."""
    return torch.cdist(samples.float().flatten(1), others.float().flatten(1)) / samples[0].numel() ** 0.5
