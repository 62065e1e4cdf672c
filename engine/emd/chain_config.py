"""Settings of the E-step: length and step sizes of the chain, and the estimator of the M-step direction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import refuse
from ..settings.config import Config

ESTIMATORS = ("cancel", "raw", "last")


@dataclass(frozen=True)
class EStepConfig(Config):
    """One E-step. The update is u <- u + gamma grad + sqrt(2 gamma) n.

    Attributes:
        steps: K, Langevin steps; at least 1 (otherwise the M-step has no signal).
        ge: step size of eps, in (0, 1].
        gz: step size of z, in [0, 1]. moving z covers modes; 0 freezes it and needs no autograd.
        estimator: of the M-step direction. ``cancel`` removes the accumulated noise (the paper), ``raw`` keeps it,
            ``last`` takes the score difference at the final point (one more pair of score calls).
        clip: largest RMS of a batch row's z drift (alpha / sigma) J^T Delta; infinity clips nothing.
    """

    steps: int = 4
    ge: float = 0.16
    gz: float = 0.01
    estimator: str = "cancel"
    clip: float = math.inf

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise refuse("steps", self.steps, "1 or more", "K = 1 with ge = 1, gz = 0 is Diff-Instruct")
        if not 0 < self.ge <= 1 or not 0 <= self.gz <= 1:
            raise refuse("step sizes", (self.ge, self.gz), "0 < ge <= 1 and 0 <= gz <= 1", "start from ge 0.16")
        if self.estimator not in ESTIMATORS:
            raise refuse("estimator", self.estimator, ESTIMATORS, "the paper's is cancel")
        if not self.clip > 0:
            raise refuse("clip", self.clip, "a positive number", "leave it at infinity for none")

    @classmethod
    def diff_instruct(cls) -> EStepConfig:
        """Diff-Instruct, or DMD without regression: one full step of eps, z frozen."""
        return cls(steps=1, ge=1.0, gz=0.0)

    def with_gz(self, gz: float, clip: float = math.inf) -> EStepConfig:
        """The settings with another step size and drift limit of z."""
        return replace(self, gz=gz, clip=clip)
