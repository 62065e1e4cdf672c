"""Settings of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from ..errors import refuse
from ..settings.option import Option, Options
from .chain import EStepConfig
from .losses import WEIGHTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EMDAdvancedConfig(Options):
    """Rarely changed training settings. Chain, trained weights and Adam are always float32."""

    auto_gz: Annotated[
        bool,
        Option(
            "Measure gz and the clip of the chain at the start "
            "(:func:`~vitrine.engine.emd.calibrate_gz`). A chain with gz 0 keeps z frozen.",
        ),
    ] = True
    weight: Annotated[str, Option("Of the M-step; uniform is the paper's.", choices=tuple(WEIGHTS))] = "uniform"
    ema: Annotated[float, Option("Decay of the exported average of the generator.", ge=0, lt=1)] = 0.999
    decay: Annotated[
        float,
        Option(
            "Fraction of the run, at its end, over which both learning rates fall to zero; 0 keeps them constant.",
            ge=0,
            le=1,
            remedy="0.5 lets the rates fall in its last half",
        ),
    ] = 0.0
    dtype: Annotated[
        str,
        Option(
            "Of the frozen networks.",
            choices=tuple(sorted(DTYPES)),
            remedy="float16 diverges in such training; use bfloat16",
        ),
    ] = "float32"
    checkpointing: Annotated[
        bool,
        Option(
            "Recompute activations in the backward pass: less memory, one more forward.",
        ),
    ] = False
    save_every: Annotated[int, Option("Steps between saves of the state.", ge=1)] = 100

    def essential(self) -> EMDAdvancedConfig:
        """The settings that the weights depend on, with those of saving and memory at their defaults."""
        default = EMDAdvancedConfig()
        return replace(self, save_every=default.save_every, checkpointing=default.checkpointing)


@dataclass(frozen=True)
class EMDTrainConfig(Options):
    """Training settings. A dict, such as a training file, may have those of ``advanced`` at the top level.

    ``chain`` is the E-step; ``EStepConfig.diff_instruct()`` is the baseline.
    """

    steps: Annotated[int, Option("Generator updates in all.", ge=1, top=1_000_000)] = 2000
    batch: Annotated[int, Option("Samples in each update.", ge=1, top=256, details="Divided among processes.")] = 16
    timestep: Annotated[
        float,
        Option(
            "The one network timestep of the student.",
            bottom=1,
            top=999,
            step=1,
            details="0 is the noisiest: 999, or 1000 for a flow.",
        ),
    ] = 0.0
    rank: Annotated[int, Option("LoRA rank of generator and score network.", ge=1, top=256)] = 16
    chain: EStepConfig = EStepConfig()
    score_updates: Annotated[int, Option("Score updates before each generator update.", ge=1)] = 1
    lr_generator: Annotated[float, Option("Learning rate of the generator; Adam has betas (0, 0.99).", gt=0)] = 1e-4
    lr_score: Annotated[float, Option("Learning rate of the score network.", gt=0)] = 5e-4
    guidance: Annotated[float, Option("Of the teacher only.", ge=0, bottom=1, top=30, step=0.5)] = 1.0
    seed: Annotated[int, Option("Of the whole run.")] = 0
    advanced: EMDAdvancedConfig = EMDAdvancedConfig()

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
