"""Settings of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import refuse
from ..settings.config import Config
from .chain import EStepConfig
from .losses import WEIGHTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EMDAdvancedConfig(Config):
    """Rarely changed training settings.

    Attributes:
        auto_gz: measure gz and the clip of the chain at the start (:func:`~vitrine.engine.emd.calibrate_gz`). A chain
            with gz 0 keeps z frozen.
        weight: of the M-step, ``uniform`` (Xie et al.) or ``dmd``.
        ema: decay of the exported average of the generator, in [0, 1).
        decay: fraction of the run, at its end, over which both learning rates fall to zero; 0 keeps them constant.
        dtype: of the frozen networks; chain, trained weights and Adam are always float32.
        checkpointing: recompute activations in the backward pass: less memory, one more forward.
        save_every: steps between saves of the state.
    """

    auto_gz: bool = True
    weight: str = "uniform"
    ema: float = 0.999
    decay: float = 0.0
    dtype: str = "float32"
    checkpointing: bool = False
    save_every: int = 100

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise refuse("save_every", self.save_every, "1 or more", "use a whole number")
        if not 0 <= self.ema < 1 or self.weight not in WEIGHTS:
            raise refuse(
                "ema, weight", (self.ema, self.weight), f"0 <= ema < 1, {WEIGHTS}", "0.999 and uniform are usual"
            )
        if not 0 <= self.decay <= 1:
            raise refuse(
                "decay", self.decay, "0 to 1, a fraction of the run", "0.5 lets the rates fall in its last half"
            )
        if self.dtype not in DTYPES:
            raise refuse("dtype", self.dtype, sorted(DTYPES), "float16 diverges in such training; use bfloat16")

    def essential(self) -> EMDAdvancedConfig:
        """The settings that the weights depend on, with those of saving and memory at their defaults."""
        default = EMDAdvancedConfig()
        return replace(self, save_every=default.save_every, checkpointing=default.checkpointing)


@dataclass(frozen=True)
class EMDTrainConfig(Config):
    """Training settings.

    Attributes:
        steps: generator updates.
        batch: batch size per update, divided among processes.
        timestep: t* of the generator; 0 is the noisiest timestep: 999, or 1000 for a flow.
        rank: of both adapters.
        chain: the E-step; ``EStepConfig.diff_instruct()`` is the baseline.
        score_updates: score updates before each generator update.
        lr_generator, lr_score: Adam with betas (0, 0.99).
        guidance: of the teacher.
        seed: of the whole run.
        advanced: rarely changed settings. A dict, such as a training file, may have them at the top level.
    """

    steps: int = 2000
    batch: int = 16
    timestep: float = 0.0
    rank: int = 16
    chain: EStepConfig = EStepConfig()
    score_updates: int = 1
    lr_generator: float = 1e-4
    lr_score: float = 5e-4
    guidance: float = 1.0
    seed: int = 0
    advanced: EMDAdvancedConfig = EMDAdvancedConfig()

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank", "score_updates"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        rates = (self.lr_generator, self.lr_score)
        if min(rates) <= 0 or self.guidance < 0:
            shown, accepted = (*rates, self.guidance), "rates above 0, guidance of 0 or more"
            raise refuse("lr_generator, lr_score, guidance", shown, accepted, "1e-4, 5e-4 and 1 are the defaults")

    def check(self, processes: int) -> None:
        """Checks the settings for a number of processes."""
        if self.batch % processes:
            accepted = f"a multiple of {processes}, the processes"
            raise refuse("batch", self.batch, accepted, "they divide each batch")

    def beginning(self, last: float) -> EMDTrainConfig:
        """The settings with t* filled in: ``last``, the schedule's noisiest timestep, if it is 0."""
        return self if self.timestep else replace(self, timestep=float(last))

    def differences(self, other: EMDTrainConfig, chain: EStepConfig | None = None) -> list[str]:
        """Differences to the settings ``other`` that a run was started with, among those that its weights depend on.

        The length (unless the rates decay towards the end), and settings of saving and memory, may change.

        Args:
            chain: that run's chain, with its calibrated gz. These settings may calibrate, too, or have the same gz.
        """
        steps = other.steps if not self.advanced.decay else self.steps
        theirs = other if chain is None else replace(other, chain=chain)
        if other.advanced.auto_gz and self.advanced.auto_gz:
            theirs = replace(theirs, chain=theirs.chain.with_gz(self.chain.gz, self.chain.clip))
        elif other.advanced.auto_gz:
            theirs = replace(theirs, advanced=replace(other.advanced, auto_gz=False))
        before, now = theirs._essential(), replace(self, steps=steps)._essential()
        return sorted(f"{name} {before[name]} (now {now[name]})" for name in now if before[name] != now[name])

    def _essential(self) -> dict[str, Any]:
        values = replace(self, advanced=self.advanced.essential()).to_dict()
        advanced: dict[str, Any] = values.pop("advanced")
        return values | advanced
