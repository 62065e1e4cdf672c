"""Detection by few-step samples: a memorized prompt gives one picture from every noise.

NeMo's score compares one-step predictions, in which little of the picture is decided. A few steps of sampling decide
it: the samples of a memorized prompt agree, and those of an ordinary caption differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import seeded_noise
from ..diffusion.sampling import few_step_latents
from ..errors import refuse
from ..jobs.run import Run
from ..network.condition import Condition, batched_rows
from ..network.site import ModuleSite
from ..runtime.finite import require_finite
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import FEW_STEPS, FewStepConfig
from ..settings.one_line import one_line
from ..settings.verdicts import BAD, FINE, OPEN, counted
from .block import block_rows
from .blocked_copies import SIDE, THIRD
from .calibration import LEAST, SampleThreshold
from .noise_similarity import PROMPT_WORDS, Neurons, Request
from .ssim import blur

_MARGIN, PLAIN = 5, 0.01
"""Of the window in which samples are compared position by position; and the fraction of the mean usual square below
which a position tells nothing."""
WHOLE = 0.5
"""Fraction of the positions that agree in samples of one whole picture; memorized ones have 0.6 to 0.8 in four steps,
ordinary captions 0.3 at most."""


@dataclass
class FewStepSampler:
    """Samples any number of prompts together, each row with its own neurons blocked, and counts the rows it spends.

    Attributes:
        empty: the empty prompt's condition, one row; needed for guidance only.
        sites: where neurons can be blocked.
        threshold: measured on ordinary captions of this model; without one there is no verdict.
        ordinary: conditions of some ordinary captions, one row each: what blocking costs is measured on them.
        rows: largest batch of one forward.
        forwards: rows that went through the network so far.
    """

    denoiser: Denoiser
    config: FewStepConfig = FEW_STEPS
    empty: Condition | None = None
    sites: Sequence[ModuleSite] = ()
    threshold: SampleThreshold | None = None
    rows: int = 80
    forwards: int = 0
    ordinary: Sequence[Condition] = ()

    def __post_init__(self) -> None:
        if self.config.guidance != 1 and self.empty is None:
            raise refuse("empty condition", None, "the empty prompt's, for guidance", "pass it, or guidance 1")
        if self.threshold is not None:
            self.threshold.check_settings(self.config)
        elif self.config.two_stage:
            raise refuse("two_stage", True, "with a threshold of this model", "calibrate, or two_stage=False")

    @property
    def at_once(self) -> int:
        """How many prompts fit into one batch."""
        return max(1, self.rows // self.config.seeds // self._branches)

    @property
    def _branches(self) -> int:
        return 1 if self.config.guidance == 1 else 2

    def noise(self, shape: Sequence[int]) -> torch.Tensor:
        """(S, C, h, w), row by row from the seeds."""
        return seeded_noise(range(self.config.first_seed, self.config.first_seed + self.config.seeds), shape)

    @torch.no_grad()
    def samples(
        self, requests: Sequence[Request], steps: int | None = None, counted: Callable[[int], None] | None = None
    ) -> list[torch.Tensor]:
        """For each request (s, C, h, w) latents, one for each of its noises.

        Args:
            steps: None takes the few that detection does.
            counted: called after each evaluation of the network with its rows.
        """
        noise, counts = torch.cat([r.noise for r in requests]), [len(r.noise) for r in requests]
        owner = [i for i, count in enumerate(counts) for _ in range(count)]
        steps, size = steps or self.config.steps, max(1, self.rows // self._branches)
        parts = [
            self._batch([requests[i] for i in owner[part]], noise[part], cond, steps, counted)
            for part, cond in batched_rows([r.cond for r in requests], owner, size)
        ]
        return list(torch.cat(parts).split(counts))

    def _batch(
        self,
        requests: Sequence[Request],
        noise: torch.Tensor,
        cond: Condition,
        steps: int,
        counted: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """One batch, a request for each row."""
        sets, doses = [r.blocked for r in requests], [r.factor for r in requests]
        empty = None if self._branches == 1 else self.empty
        together = empty is not None and cond.alike(empty)
        rows = self._branches * len(noise)
        self.forwards += steps * rows
        branches = 2 if together else 1
        with block_rows(self.denoiser.backbone, self.sites, sets * branches, doses * branches):
            return few_step_latents(
                self.denoiser,
                noise,
                steps,
                cond,
                null=empty,
                guidance=self.config.guidance,
                shift=self.config.shift,
                progress=lambda *_: None if counted is None else counted(rows),
            )


@one_line
@dataclass(frozen=True)
class Agreement:
    """How alike the few-step samples of one prompt are, and whether that means that it is memorized.

    Attributes:
        distances: (S (S - 1) / 2,) root mean square of the difference of each pair of samples.
        config: how they were made.
        threshold: measured on ordinary captions of this model; without one there is a distance, but no verdict.
        samples: (S, C, h, w) latents; None where they were not kept.
        area: fraction of the informative positions where samples agree: less than a third of the usual distance; NaN
            without a threshold.
    """

    distances: torch.Tensor
    config: FewStepConfig
    threshold: SampleThreshold | None = None
    samples: torch.Tensor | None = None
    area: float = math.nan

    def __post_init__(self) -> None:
        require_finite(self.distances, "distance of a prompt's samples")  # no verdict is made of NaN

    @classmethod
    def of(cls, samples: torch.Tensor, config: FewStepConfig, threshold: SampleThreshold | None = None) -> Agreement:
        """From the samples, (S, C, h, w) latents."""
        agreement = cls(squares(samples).mean((1, 2)).sqrt(), config, threshold, samples)
        if threshold is None:
            return agreement
        fractions = agreement.map
        telling = torch.isfinite(fractions)
        return replace(
            agreement, area=float((fractions[telling] < THIRD).float().mean()) if bool(telling.any()) else 0.0
        )

    @property
    def count(self) -> int:
        """S, how many samples were compared."""
        return round((1 + math.sqrt(1 + 8 * len(self.distances))) / 2)

    @property
    def rows(self) -> int:
        """UNet evaluations that they cost."""
        return self.config.rows // self.config.seeds * self.count

    @property
    def distance(self) -> float:
        """The median pair's: the smaller, the more the samples agree."""
        return float(self.distances.quantile(0.5))

    @property
    def memorized(self) -> bool:
        """True if the samples differ less than those of ordinary captions."""
        return self.distance < self._known.distance

    @property
    def ratio(self) -> float:
        """The distance as a share of what is usual for ordinary captions; see :attr:`memorized`."""
        return self.distance / self._known.usual

    @property
    def map(self) -> torch.Tensor:
        """(64, 64) distance around each position as a share of the usual one there; see :attr:`memorized`.

        Infinite where all ordinary samples are alike, which tells nothing.
        """
        if self.samples is None:
            raise refuse("samples", None, "an agreement with its samples", "detect with keep=True")
        usual = self._known.places
        fraction = (local_squares(self.samples).mean(0) / usual.clamp_min(1e-12)).sqrt()
        return torch.where(usual < PLAIN * usual.mean(), torch.inf, fraction)

    @property
    def kind(self) -> str:
        """``whole picture`` or ``part of it`` (a template), of a memorized prompt; else ``none``."""
        if not self.memorized:
            return "none"
        return "whole picture" if self.area >= WHOLE else "part of it"

    @property
    def verdict(self) -> str:
        """``memorized``, ``not memorized``, or ``no verdict`` where no threshold was measured for this model."""
        return PROMPT_WORDS[self.rated]

    @property
    def rated(self) -> str:
        """The same in the words of :mod:`vitrine.engine.settings.verdicts`: bad, fine, not measured."""
        if self.threshold is None:
            return OPEN
        return BAD if self.memorized else FINE

    @property
    def _known(self) -> SampleThreshold:
        if self.threshold is None:
            remedy = "vitrine nemo calibrate, NEMOPipeline.calibrate or Calibrate Copy Detection (NEMO)"
            raise refuse("threshold", None, "one measured on this model", remedy)
        return self.threshold

    def text(self) -> str:
        """The verdict with the samples, seeds, settings and threshold that it is made of."""
        first, count = self.config.first_seed, self.count
        measured = counted(self.verdict, count, self.config.seeds, "samples")
        made = (
            f"{measured} (seeds {first} to {first + count - 1}, {self.config.steps} steps, "
            f"guidance {self.config.guidance:g}); they differ by {self.distance:.4f}"
        )
        if self.threshold is None:
            return f"{made}\nno threshold was measured for this model: calibrate"
        known = self.threshold
        if count < self.config.seeds:
            made += "; two stages: the others are sampled only if these agree"
        lines = [
            made,
            f"memorized is below {known.distance:.4f}; usual is {known.usual:.4f} ({known.count} ordinary captions)",
            f"{self.area:.0%} of the picture agrees",
        ]
        return "\n".join(lines[:2] + ([f"{lines[2]}: {self.kind}"] if self.memorized else lines[2:]))

    def columns(self) -> dict[str, str]:
        """For tables: the verdict and all that it is made of."""
        config, known = self.config, self._known
        return {
            "distance": f"{self.distance:.6f}",
            "memorized": "yes" if self.memorized else "no",
            "kind": self.kind,
            "area": f"{self.area:.3f}",
            "threshold": f"{known.distance:.6f}",
            "usual": f"{known.usual:.6f}",
            "captions": str(known.count),
            "samples": str(self.count),
            "first_seed": str(config.first_seed),
            "steps": str(config.steps),
            "guidance": f"{config.guidance:g}",
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        plain: dict[str, Any] = {"verdict": self.verdict, "distance": self.distance, "settings": self.config.to_dict()}
        plain |= {"samples": self.count, "rows": self.rows}
        if self.threshold is not None:
            plain |= {"threshold": self.threshold.distance, "usual": self.threshold.usual}
            plain |= {"captions": self.threshold.count, "area": self.area, "kind": self.kind}
        return plain


def squares(samples: torch.Tensor) -> torch.Tensor:
    """(S (S - 1) / 2, h, w) mean square over channels of the difference of each pair of (S, C, h, w)."""
    first, second = torch.triu_indices(len(samples), len(samples), 1).to(samples.device)
    return (samples[first] - samples[second]).float().square().mean(1)


def local_squares(samples: torch.Tensor) -> torch.Tensor:
    """(pairs, 64, 64): :func:`squares` under a Gaussian window of 11 of the 64 positions."""
    pairs = F.interpolate(squares(samples)[:, None].cpu(), (SIDE, SIDE), mode="bilinear", antialias=True)
    return blur(F.pad(pairs, (_MARGIN,) * 4, mode="reflect"))[:, 0]


@torch.no_grad()
def sample_agreement(
    sampler: FewStepSampler,
    conds: Sequence[Condition],
    shape: tuple[int, int, int],
    progress: Progress = silent,
    blocked: Sequence[Neurons] | None = None,
    keep: bool = True,
) -> list[Agreement]:
    """The agreement of each prompt's samples, from a condition of one row each, in full batches.

    Args:
        shape: (C, h, w) of the latents.
        blocked: address -> neurons to block, for each prompt.
        keep: the samples too, which a map needs.
    """
    config, agreements = sampler.config, []
    noise = sampler.noise(shape).to(conds[0].device if conds else "cpu")
    for start in range(0, len(conds), sampler.at_once):
        part = range(start, min(start + sampler.at_once, len(conds)))
        requests = [Request(conds[i], noise, {} if blocked is None else blocked[i]) for i in part]
        for samples in _staged(sampler, requests) if config.two_stage else sampler.samples(requests):
            agreement = Agreement.of(samples.cpu(), config, sampler.threshold)
            agreements.append(agreement if keep else replace(agreement, samples=None))
        progress(part.stop, len(conds), None)
    return agreements


def _staged(sampler: FewStepSampler, requests: Sequence[Request]) -> list[torch.Tensor]:
    """Two samples of each; the others only where these two agree."""
    assert sampler.threshold is not None
    sampled = sampler.samples([replace(r, noise=r.noise[:2]) for r in requests])
    alike = [i for i, pair in enumerate(sampled) if float(squares(pair).mean().sqrt()) < sampler.threshold.first_pair]
    if alike and sampler.config.seeds > 2:
        others = sampler.samples([replace(requests[i], noise=requests[i].noise[2:]) for i in alike])
        for i, samples in zip(alike, others, strict=True):
            sampled[i] = torch.cat([sampled[i], samples])
    return sampled


def sample_threshold(agreements: Sequence[Agreement], fingerprint: str = "") -> SampleThreshold:
    """The threshold from the agreements of ordinary captions, with their samples.

    Args:
        fingerprint: of the model.
    """
    if not agreements:
        raise refuse("ordinary captions", 0, f"{LEAST} or more", "300 are a good start")
    positions = usual_places(agreements) / len(agreements)
    return SampleThreshold.of([a.distance for a in agreements], positions, agreements[0].config, fingerprint)


def usual_places(agreements: Sequence[Agreement]) -> torch.Tensor:
    """(64, 64) sum over prompts of the mean square of the difference of two samples around each position."""
    kept = [a.samples for a in agreements if a.samples is not None]
    return torch.stack([local_squares(samples).mean(0) for samples in kept]).sum(0)


def keep_agreements(run: Run, agreements: Sequence[Agreement]) -> None:
    """Write the agreements so far but for their samples; pairs that two stages left out are NaN."""
    pairs = torch.nn.utils.rnn.pad_sequence([a.distances for a in agreements], True, torch.nan)
    areas = torch.tensor([a.area for a in agreements])
    run.save({"agreements": {"distances": pairs, "areas": areas}})


def kept_agreements(run: Run, config: FewStepConfig, threshold: SampleThreshold | None) -> list[Agreement]:
    """What :func:`keep_agreements` wrote; nothing where nothing was."""
    state = run.load()
    if state is None:
        return []
    kept = state.tensors["agreements"]
    rows = zip(kept["distances"], kept["areas"].tolist(), strict=True)
    return [Agreement(pairs[pairs == pairs], config, threshold, area=area) for pairs, area in rows]


@dataclass
class UsualSamples:
    """How far samples of ordinary captions differ, so far.

    Attributes:
        distances: of each caption.
        places: (64, 64) sum of :func:`usual_places`.
    """

    distances: list[float] = field(default_factory=list)
    places: torch.Tensor = field(default_factory=lambda: torch.zeros(64, 64))

    @classmethod
    def resumed(cls, run: Run) -> UsualSamples:
        """What :meth:`keep` wrote; empty where nothing was."""
        state = run.load()
        if state is None:
            return cls()
        kept = state.tensors["usual"]
        return cls(kept["distances"].tolist(), kept["places"])

    @classmethod
    def joined(cls, parts: Sequence[UsualSamples]) -> UsualSamples:
        """Those of several processes."""
        distances = [distance for part in parts for distance in part.distances]
        return cls(distances, torch.stack([part.places for part in parts]).sum(0))

    def add(self, agreements: Sequence[Agreement]) -> None:
        """Further captions, with their samples."""
        self.distances += [agreement.distance for agreement in agreements]
        self.places = self.places + usual_places(agreements)

    def keep(self, run: Run) -> None:
        """Write it, whole or not at all."""
        run.save({"usual": {"distances": torch.tensor(self.distances), "places": self.places}})

    def threshold(self, config: FewStepConfig, fingerprint: str) -> SampleThreshold:
        """The threshold, see :meth:`~vitrine.engine.nemo.calibration.SampleThreshold.of`."""
        positions = self.places / max(1, len(self.distances))
        return SampleThreshold.of(self.distances, positions, config, fingerprint)
