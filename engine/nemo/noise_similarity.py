"""The probe: one forward of S noises, its signal, and the similarity by which a memorized prompt is recognised.

The signal, delta = eps(x_T, T, y) - x_T, is the one-step clean prediction but for its sign and a fraction of a percent.
A memorized prompt predicts the same picture from every noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..diffusion.denoiser import Denoiser
from ..diffusion.guidance import guide
from ..errors import refuse
from ..io.number_checks import refuse_unless_finite
from ..jobs.run import Run
from ..network.condition import Condition, batched_rows
from ..network.site import ModuleSite
from ..runtime.finite import require_finite
from ..settings.nemo_options import ProbeConfig, check_tau
from ..settings.one_line import one_line
from ..settings.verdicts import BAD, FINE, OPEN, counted
from .block import block_rows
from .ssim import betas_for, ms_ssim

Neurons = Mapping[str, Sequence[int]]


def ddim_timestep(steps: int, index: int, total: int = 1000) -> float:
    """Timestep ``index`` of the DDIM grid with leading spacing and offset 1: 981, 961, ... for 50 steps."""
    return float(total // steps * (steps - 1 - index) + 1)


def probe_noise(config: ProbeConfig, shape: tuple[int, int, int]) -> torch.Tensor:
    """(S, C, h, w) from one generator at once, as in the official code, which seeds the global one for it."""
    return torch.randn(config.seeds, *shape, generator=torch.Generator().manual_seed(config.seed))


def min_max(d: torch.Tensor) -> torch.Tensor:
    """Each sample and channel to [0, 1] over H and W (NeMo, section 3.1); a constant channel becomes 0."""
    low, high = d.amin((-2, -1), keepdim=True), d.amax((-2, -1), keepdim=True)
    return (d - low) / (high - low).clamp_min(1e-12)


@dataclass(frozen=True)
class Request:
    """What one probe needs.

    Attributes:
        cond: a prompt's condition, one row.
        noise: s of its noises, (s, C, h, w).
        blocked: address -> neurons.
        factor: what these are multiplied by.
    """

    cond: Condition
    noise: torch.Tensor
    blocked: Neurons
    factor: float = 0.0


@dataclass
class Probe:
    """Runs the requests of any number of prompts together, in full batches, and counts the rows it spends.

    Attributes:
        t: the network's timestep, the same for all requests.
        rows: largest batch of one forward.
        empty: the unconditional condition (one row); needed for guidance only.
        forwards: rows that went through the network so far.
    """

    denoiser: Denoiser
    sites: list[ModuleSite]
    t: float
    config: ProbeConfig = ProbeConfig()
    rows: int = 80
    empty: Condition | None = None
    forwards: int = 0

    @property
    def at_once(self) -> int:
        """How many prompts fit into one forward."""
        return max(1, self.rows // self.config.seeds)

    def __post_init__(self) -> None:
        if self.config.guidance and self.empty is None:
            raise refuse("empty condition", None, "the empty prompt's, for guidance", "pass it, or guidance 0")

    @torch.no_grad()
    def signals(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """For each request (s, C, h, w) in [0, 1]: eps(x_T, T, y) - x_T or the clean prediction, min-max by channel."""
        noise, counts = torch.cat([r.noise for r in requests]), [len(r.noise) for r in requests]
        owner = [i for i, count in enumerate(counts) for _ in range(count)]
        batches = [
            self._forward([requests[i] for i in owner[part]], noise[part], cond)
            for part, cond in batched_rows([r.cond for r in requests], owner, self.rows)
        ]
        return list(torch.cat(batches).split(counts))

    def _forward(self, requests: Sequence[Request], noise: torch.Tensor, cond: Condition) -> torch.Tensor:
        """Signals of one batch (b, C, h, w), a request for each row."""
        sets, doses = [r.blocked for r in requests], [r.factor for r in requests]
        if self.config.guidance:
            return min_max(self._guided(noise, cond, sets, doses) - noise.float())
        self.forwards += len(noise)
        with block_rows(self.denoiser.backbone, self.sites, sets, doses):
            prediction = self.denoiser.predict(noise, self.t, cond)
        # NeMo, section 3.1: delta = eps(x_T, T, y) - x_T. Unit noise is what the network is given, so x_T is the input.
        signal = prediction.x0 if self.config.signal == "x0" else prediction.eps - noise.float()
        return min_max(signal)

    def _guided(self, noise: torch.Tensor, cond: Condition, sets: list[Neurons], doses: list[float]) -> torch.Tensor:
        """eps with guidance, both branches blocked alike."""
        assert self.empty is not None
        empty = self.empty.take(torch.zeros(len(noise), dtype=torch.long))
        branches = [Condition.batch([cond, empty])] if cond.alike(empty) else [cond, empty]
        repeats = 2 // len(branches)
        self.forwards += 2 * len(noise)
        with block_rows(self.denoiser.backbone, self.sites, sets * repeats, doses * repeats):
            predictions = [self.denoiser.predict(noise.repeat(repeats, 1, 1, 1), self.t, branch) for branch in branches]
        full, null = torch.cat([p.eps for p in predictions]).chunk(2)
        return guide(null, full, self.config.guidance)

    def similarity(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(B,) similarity of two batches of signals, as the configuration says."""
        return ms_ssim(a, b, betas_for(min(a.shape[-2:])), self.data_range)

    @property
    def data_range(self) -> float | None:
        """Of the similarity; None is the batch's own."""
        return None if self.config.range_of_batch else 1.0

    def metric(self, shape: Sequence[int]) -> str:
        """The similarity in words: small latents have fewer scales, and other scores."""
        scales = len(betas_for(min(shape[-2:])))
        return f"MS-SSIM of {scales} scales, range {'of the batch' if self.config.range_of_batch else '1'}"

    def per_seed(self, signals: torch.Tensor) -> torch.Tensor:
        """(S,) from the signals of S seeds: how alike each is to the one most like it; all pairs in one batch."""
        first, second = torch.triu_indices(len(signals), len(signals), 1).to(signals.device)
        pairs = self.similarity(signals[first], signals[second])
        table = signals.new_zeros(len(signals), len(signals), dtype=pairs.dtype)
        table[first, second] = pairs
        table[second, first] = pairs
        # NeMo, Eq. 2: s_i = max over j of the similarity of seeds i and j
        return table.max(1).values


PROMPT_WORDS = {BAD: "memorized", FINE: "not memorized", OPEN: "no verdict"}
"""Verdicts on a prompt."""


@one_line
@dataclass(frozen=True)
class Score:
    """How alike the predictions of a prompt's seeds are, and whether that means that it is memorized.

    Attributes:
        per_seed: (S,) similarity of each seed to the one most like it, 0..1.
        tau: the threshold; without one there is a score, but no verdict.
        metric: what the similarity is, in words.
    """

    per_seed: torch.Tensor
    tau: float | None = None
    metric: str = ""

    def __post_init__(self) -> None:
        refuse_unless_finite("tau", self.tau)  # no verdict is made of NaN
        require_finite(self.per_seed, "score of a prompt's seeds")

    @property
    def value(self) -> float:
        """The largest cross-seed score."""
        return float(self.per_seed.max())

    @property
    def keep(self) -> torch.Tensor:
        """(S,) bool: seeds that agree with another one by more than tau."""
        return self.per_seed > check_tau(self.tau)

    @property
    def memorized(self) -> bool:
        """True if any seed agrees with another one."""
        return bool(self.keep.any())

    @property
    def rated(self) -> str:
        """In the words of :mod:`vitrine.engine.settings.verdicts`: bad, fine, or not measured without a threshold."""
        if self.tau is None:
            return OPEN
        return BAD if self.memorized else FINE

    def text(self, config: ProbeConfig) -> str:
        """The verdict with the seeds, settings and threshold that it is made of."""
        measured = counted(PROMPT_WORDS[self.rated], len(self.per_seed), config.seeds, "seeds")
        level = (
            "no threshold was measured for this model: calibrate"
            if self.tau is None
            else f"memorized is above tau {self.tau:.3f}"
        )
        made = f"of one generator, seed {config.seed}, timestep index {config.timestep_index} of {config.steps}"
        return f"{measured}; score {self.value:.3f}\n{level}\n{made}; {self.metric}"


def keep_scores(run: Run, scores: Sequence[Score]) -> None:
    """Write the scores so far, whole or not at all."""
    run.save({"scores": {"per_seed": torch.stack([s.per_seed for s in scores])}})


def kept_scores(run: Run, tau: float | None) -> list[Score]:
    """What :func:`keep_scores` wrote; nothing where nothing was."""
    state = run.load()
    return [] if state is None else [Score(row, tau) for row in state.tensors["scores"]["per_seed"]]
