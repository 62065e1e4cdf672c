"""Settings of detection and search, as frozen objects that validate themselves.

Defaults of the probe and the search are the published ones (SD1.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import refuse
from ..settings.config import Config

SIGNALS = ("eps_minus_noise", "x0")
MODES = ("parity", "chain", "fast")
PROTOCOLS = ("vitrine", "nemo")
METHODS = ("samples", "one step")

PAPER_TAU = 0.428
"""The authors' threshold for SD1.4 at 512 px (mean 0.358 + one std 0.070 of unmemorized captions)."""


def check_tau(tau: float | None) -> float:
    """A threshold that somebody measured."""
    if tau is None:
        remedy = "calibrate on 200 or more ordinary captions; PAPER_TAU (0.428) is for SD1.4 at 512 px alone"
        raise refuse("tau", None, "a threshold measured on this model at this size", remedy)
    return tau


def check_protocol(protocol: str) -> bool:
    """Whether the protocol is the published one."""
    if protocol not in PROTOCOLS:
        raise refuse("protocol", protocol, PROTOCOLS, "nemo is the published one, vitrine judges by samples")
    return protocol == PROTOCOLS[1]


def check_method(method: str) -> bool:
    """Whether the method of detection is the published one."""
    if method not in METHODS:
        raise refuse("method", method, METHODS, "one step is the published score, samples tells more")
    return method == METHODS[1]


@dataclass(frozen=True)
class ProbeConfig(Config):
    """How a prompt is probed: one forward of S seeds at one timestep (NeMo, Eq. 2).

    Attributes:
        seeds: S, number of initial noises.
        seed: of the generator they are sampled from, S rows at once as in the official code.
        steps: sampling steps of the DDIM grid that the timestep belongs to.
        timestep_index: position in that grid; 1 is what the official code uses (t = 961 of 50 steps), 0 the paper's.
        signal: ``eps_minus_noise`` (published) or ``x0``, the one-step clean prediction (any convention, flow too).
        range_of_batch: the similarity takes its range from the batch, as the official code and searches of mode
            ``parity`` do; else it is 1, and a seed's score does not depend on its companions.
        guidance: 0 takes the conditional prediction alone (published detection), else eps_u + g (eps_c - eps_u),
            at twice the rows.
    """

    seeds: int = 10
    seed: int = 1
    steps: int = 50
    timestep_index: int = 1
    signal: str = "eps_minus_noise"
    range_of_batch: bool = False
    guidance: float = 0.0

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise refuse(
                "seeds", self.seeds, "2 or more", "the score compares seeds with each other; the paper uses 10"
            )
        if not 0 <= self.timestep_index < self.steps:
            raise refuse("timestep_index", self.timestep_index, f"0 .. {self.steps - 1}", "use 1")
        if self.signal not in SIGNALS:
            raise refuse("signal", self.signal, SIGNALS, "x0 works for every model")
        if self.guidance < 0 or (self.guidance and self.signal == "x0"):
            pair = (self.guidance, self.signal)
            raise refuse("guidance, signal", pair, "guidance >= 0 with eps_minus_noise", "0 is the published way")


@dataclass(frozen=True)
class SearchConfig(Config):
    """The search for neurons (NeMo, Algorithms 2 to 4).

    Attributes:
        tau: memorization threshold of one-step predictions in (0, 1]; None until it was calibrated: no number is right
            for every model and size.
        effect_fraction: in (0, 1]: the search stops when blocking the candidates does this fraction of what blocking
            every neuron in scope does to the prediction. Not published; needs no calibration.
        theta, theta_step, theta_min: start, decrement and end of the outlier threshold on |z|.
        k, k_step: start and increment of how many of the strongest neurons join in each layer.
        mode: ``parity`` tests one neuron after another, as the official code does; ``chain`` tests several cumulative
            candidates in one batch, with the same result for a similarity of the same range; ``fast`` drops groups at
            once and halves those it must keep.
        rows: largest batch of one forward.
        protocol: ``vitrine`` searches every prompt that it is given, from all seeds, and stops at ``effect_fraction``.
            ``nemo`` is the published rule: only prompts with seeds that agree by more than tau are searched, from these
            seeds, and the search stops when blocked and unblocked predictions agree by no more than tau.
    """

    tau: float | None = None
    effect_fraction: float = 0.98
    theta: float = 5.0
    theta_step: float = 0.25
    theta_min: float = 1.0
    k: int = 0
    k_step: int = 1
    mode: str = "chain"
    rows: int = 80
    protocol: str = PROTOCOLS[0]

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        if self.tau is not None and not 0 < self.tau <= 1:
            raise refuse("tau", self.tau, "a similarity in (0, 1]", "calibrate it, or use 0.428 for SD1.4")
        if not 0 < self.effect_fraction <= 1:
            raise refuse("effect_fraction", self.effect_fraction, "a number in (0, 1]", "0.95 is a good start")
        finite = all(map(math.isfinite, (self.theta, self.theta_step, self.theta_min)))
        if not (finite and self.theta_step > 0 and self.theta > self.theta_min >= 0 <= min(self.k, self.k_step)):
            raise refuse("theta, k", self.to_dict(), "theta > theta_min >= 0, positive steps", "use 5, 0.25, 1, 0, 1")
        if self.mode not in MODES:
            raise refuse("mode", self.mode, MODES, "chain is the usual one")
        if self.rows < 1:
            raise refuse("rows", self.rows, "1 or more", "use 80")

    @property
    def published(self) -> bool:
        """Whether only prompts above tau are searched."""
        return check_protocol(self.protocol)

    @property
    def evaluations(self) -> int:
        """How many pairs (theta, k) are tried at most: the official loop never evaluates theta_min itself."""
        return max(1, -int(-(self.theta - self.theta_min) / self.theta_step // 1))


@dataclass(frozen=True)
class FewStepConfig(Config):
    """What is sampled for each prompt. The defaults were chosen on the pictures that the portraits model memorized.

    Attributes:
        seeds: S, samples that are compared with each other.
        first_seed: of their noises; each seed makes one picture's noise.
        steps: of sampling.
        guidance: scale, as you sample; 1 is without, at half the batch rows.
        two_stage: compare the first two samples first, and sample the others only where these agree more than ordinary
            captions do. Needs a threshold.
        shift: of a flow's times towards noise, as you sample; 1 is without.
    """

    seeds: int = 4
    first_seed: int = 1
    steps: int = 4
    guidance: float = 3.0
    two_stage: bool = False
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.seeds < 2 or self.steps < 1:
            raise refuse("seeds, steps", (self.seeds, self.steps), "2 seeds and 1 step or more", "use 4 and 4")
        if not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise refuse("guidance", self.guidance, "a number of 0 or more", "use that of your samples")
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise refuse("shift", self.shift, "a number above 0", "use that of the model's scheduler")

    @property
    def rows(self) -> int:
        """UNet evaluations for each prompt."""
        return self.seeds * self.steps * (1 if self.guidance == 1 else 2)


FEW_STEPS = FewStepConfig()
