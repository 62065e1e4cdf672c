"""Options of detection and search. Defaults of the probe and the search are the published ones (SD1.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import refuse
from .option import Option, Options

SIGNALS = ("eps_minus_noise", "x0")
MODES = ("parity", "chain", "fast")
PROTOCOLS = ("vitrine", "nemo")
METHODS = ("samples", "one step")

FULL_STEPS = 20
"""Of samples as people make them."""
PAPER_TAU = 0.428
"""The authors' threshold for SD1.4 at 512 px (mean 0.358 + one std 0.070 of unmemorized captions)."""


def check_tau(tau: float | None) -> float:
    """A threshold that somebody measured."""
    if tau is None:
        remedy = "calibrate on 200 or more ordinary captions; PAPER_TAU (0.428) is for SD1.4 at 512 px alone"
        raise refuse("tau", None, "a threshold measured on this model at this size", remedy)
    return tau


def check_method(method: str) -> bool:
    """Whether the method of detection is the published one."""
    if method not in METHODS:
        raise refuse("method", method, METHODS, "one step is the published score, samples tells more")
    return method == METHODS[1]


Tau = Annotated[
    float | None,
    Option(
        "Threshold of memorization, from Calibrate Copy Detection (NEMO): 0.428 is SD1.4's at 512 px.",
        gt=0,
        le=1,
        step=0.001,
        unset=0.0,
        unset_doc="a score without a verdict",
        remedy="calibrate it, or use 0.428 for SD1.4",
    ),
]


@dataclass(frozen=True)
class ProbeConfig(Options):
    """How a prompt is probed: one forward of S seeds at one timestep (NeMo, Eq. 2)."""

    seeds: Annotated[int, Option("Noises compared with each other; the paper: 10.", ge=2, top=64)] = 10
    seed: Annotated[
        int,
        Option(
            "Of the generator that gives all noises at once, as in the official code.",
            node=False,
        ),
    ] = 1
    steps: Annotated[
        int,
        Option(
            "Sampling steps of the DDIM grid that the timestep belongs to.",
            ge=1,
            node=False,
        ),
    ] = 50
    timestep_index: Annotated[
        int,
        Option(
            "Which of a run's 50 DDIM steps is looked at, from 0: 1 (timestep 961) is "
            "published; small models may need 4 to 15.",
            ge=0,
            top=49,
            details="The paper says 0, its code takes 1.",
        ),
    ] = 1
    signal: Annotated[
        str,
        Option(
            "eps_minus_noise is published; x0 is the one-step clean prediction, of any convention.",
            choices=SIGNALS,
            node=False,
        ),
    ] = "eps_minus_noise"
    range_of_batch: Annotated[
        bool,
        Option(
            "The similarity takes its range from the batch, as the official code and searches "
            "of mode parity do; else it is 1, and a seed's score does not depend on the other seeds.",
        ),
    ] = False
    guidance: Annotated[
        float,
        Option(
            "Guidance scale of the prediction, at twice the batch rows; 0 is the published way, the conditional "
            "prediction alone.",
            ge=0,
        ),
    ] = 0.0

    def _check(self) -> None:
        """The timestep is in the grid; guidance is for noise predictions."""
        if self.timestep_index >= self.steps:
            raise refuse("timestep_index", self.timestep_index, f"0 .. {self.steps - 1}", "use 1")
        if self.guidance and self.signal == "x0":
            pair = (self.guidance, self.signal)
            raise refuse("guidance, signal", pair, "guidance >= 0 with eps_minus_noise", "0 is the published way")


@dataclass(frozen=True)
class SearchConfig(Options):
    """The search for neurons (NeMo, Algorithms 2 to 4)."""

    tau: Tau = None
    effect_fraction: Annotated[
        float,
        Option(
            "The search ends when blocking has this fraction of the effect of blocking "
            "everything. The protocol nemo ends at the threshold instead.",
            gt=0,
            le=1,
            step=0.01,
            details="Not published; needs no calibration.",
        ),
    ] = 0.98
    theta: Annotated[float, Option("First outlier threshold on |z|.", gt=0, node=False)] = 5.0
    theta_step: Annotated[float, Option("How much it is lowered each time.", gt=0, node=False)] = 0.25
    theta_min: Annotated[float, Option("Where the lowering ends.", ge=0, node=False)] = 1.0
    k: Annotated[int, Option("How many of each layer's strongest neurons join at first.", ge=0, node=False)] = 0
    k_step: Annotated[int, Option("How many more join each time.", ge=0, node=False)] = 1
    mode: Annotated[
        str,
        Option(
            "chain tests several neurons at once; parity one, measured as the authors do.",
            choices=MODES,
            advanced=True,
            details="Chain gives parity's result for a similarity of the same range; fast drops groups "
            "at once and halves those it must keep.",
        ),
    ] = "chain"
    rows: Annotated[int, Option("Largest batch of one forward.", ge=1, node=False)] = 80
    protocol: Annotated[
        str,
        Option(
            "vitrine searches the prompt you give; nemo only one that scores above the threshold, as published.",
            choices=PROTOCOLS,
            advanced=True,
            details="All seeds count with vitrine; nemo takes those that agree by more "
            "than tau, and ends when blocked and unblocked predictions agree by no more than tau.",
        ),
    ] = PROTOCOLS[0]

    def _check(self) -> None:
        """The thresholds are in order."""
        if self.theta <= self.theta_min:
            raise refuse("theta", (self.theta, self.theta_min), "theta above theta_min", "use 5 and 1")

    sample_steps: Annotated[
        int,
        Option(
            "Steps of the full samples that decide whether a dose cures: as many as you sample with.",
            ge=1,
            top=100,
            advanced=True,
        ),
    ] = FULL_STEPS

    @property
    def published(self) -> bool:
        """Whether only prompts above tau are searched."""
        return self.protocol == PROTOCOLS[1]

    @property
    def evaluations(self) -> int:
        """How many pairs (theta, k) are tried at most: the official loop never evaluates theta_min itself."""
        return max(1, -int(-(self.theta - self.theta_min) / self.theta_step // 1))


@dataclass(frozen=True)
class FewStepConfig(Options):
    """What is sampled for each prompt. The defaults were chosen on the pictures that the portraits model memorized."""

    seeds: Annotated[int, Option("Of each prompt, compared with each other.", ge=2, top=16)] = 4
    first_seed: Annotated[int, Option("Of the samples' noises.", ge=0, top=2**31)] = 1
    steps: Annotated[int, Option("Of these samples: a few decide the picture.", ge=1, top=50)] = 4
    guidance: Annotated[float, Option("As you sample; 1 is without.", ge=0, top=100, step=0.1)] = 3.0
    two_stage: Annotated[
        bool,
        Option(
            "Two samples first, the others only if these agree: about half the cost on ordinary prompts.",
            details="Needs a threshold.",
            node=False,
        ),
    ] = False
    shift: Annotated[
        float,
        Option(
            "Of a flow's times towards noise, as you sample; 1 is without.",
            gt=0,
            node=False,
        ),
    ] = 1.0

    @property
    def rows(self) -> int:
        """UNet evaluations for each prompt."""
        return self.seeds * self.steps * (1 if self.guidance == 1 else 2)


FEW_STEPS = FewStepConfig()
