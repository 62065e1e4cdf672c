"""Settings of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import refuse
from ..settings.config import Config
from .chain_config import EStepConfig
from .losses import WEIGHTS

STUDENTS = ("lora", "full")
OBJECTIVES = ("emd", "sid")
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
        grid_every: steps between sample grids (0: never); needs the trainer's ``decode``.
        meter_every: steps between readings of the bias meter (0: never).
        log_every: steps between table rows of log.csv, and of TensorBoard if it is installed (0: never).
        accumulate: batches whose gradients are accumulated per update.
        keep: number of generator exports to keep, of those at each save (0: only the final one).
        objective: of the generator: ``emd``, or ``sid`` for the loss of :func:`~vitrine.engine.emd.sid_loss`, for flow
            teachers only; chain and ``weight`` are then unused.
        alpha: of ``sid``.
    """

    auto_gz: bool = True
    weight: str = "uniform"
    ema: float = 0.999
    decay: float = 0.0
    dtype: str = "float32"
    checkpointing: bool = False
    save_every: int = 100
    grid_every: int = 0
    meter_every: int = 0
    log_every: int = 10
    accumulate: int = 1
    keep: int = 0
    objective: str = "emd"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.save_every < 1 or self.accumulate < 1:
            shown = (self.save_every, self.accumulate)
            raise refuse("save_every, accumulate", shown, "1 or more", "use whole numbers")
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
        if self.objective not in OBJECTIVES:
            raise refuse("objective", self.objective, OBJECTIVES, "emd is that of Xie et al.")
        rare = (self.grid_every, self.meter_every, self.log_every, self.keep)
        if min(rare) < 0:
            raise refuse("grid_every, meter_every, log_every, keep", rare, "0 or more", "0 is never")

    def essential(self) -> EMDAdvancedConfig:
        """The settings that the weights depend on, with those of saving, logging and memory at their defaults."""
        default = EMDAdvancedConfig()
        return replace(
            self, save_every=default.save_every, grid_every=default.grid_every, meter_every=default.meter_every,
            checkpointing=default.checkpointing, log_every=default.log_every, keep=default.keep,
        )  # fmt: skip


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
        lr_generator, lr_score: Adam with betas (0, 0.99). 1e-4 suits a LoRA generator, 2e-6 a full one.
        guidance: of the teacher.
        seed: of the whole run.
        student: ``lora``, or ``full`` for a full copy of the network.
        score: likewise for the score network.
        score_rank: of its adapter; 0 takes ``rank``.
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
    student: str = "lora"
    score: str = "lora"
    score_rank: int = 0
    advanced: EMDAdvancedConfig = EMDAdvancedConfig()

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank", "score_updates"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        for name in ("student", "score"):
            if getattr(self, name) not in STUDENTS:
                raise refuse(name, getattr(self, name), STUDENTS, "lora is the small one")
        rates = (self.lr_generator, self.lr_score)
        if min(rates) <= 0 or self.guidance < 0:
            shown, accepted = (*rates, self.guidance), "rates above 0, guidance of 0 or more"
            raise refuse("lr_generator, lr_score, guidance", shown, accepted, "1e-4, 5e-4 and 1 are the defaults")
        if self.score_rank < 0:
            raise refuse("score_rank", self.score_rank, "0 or more", "0 takes rank")

    def check(self, processes: int, decodes: bool) -> None:
        """Checks the settings for a number of processes."""
        if self.batch % processes:
            accepted = f"a multiple of {processes}, the processes"
            raise refuse("batch", self.batch, accepted, "they divide each batch")
        every = self.advanced.grid_every
        if every and not decodes:
            raise refuse("grid_every", every, "0 without decode", "pass decode=, latents to pictures")

    @property
    def full(self) -> tuple[str, ...]:
        """The roles with full copies of the network."""
        return tuple(role for role, kind in (("generator", self.student), ("score", self.score)) if kind == "full")

    def beginning(self, last: float) -> EMDTrainConfig:
        """The settings with t* filled in: ``last``, the schedule's noisiest timestep, if it is 0."""
        return self if self.timestep else replace(self, timestep=float(last))

    def differences(self, other: EMDTrainConfig, chain: EStepConfig | None = None) -> list[str]:
        """Differences to the settings ``other`` that a run was started with, among those that its weights depend on.

        The length (unless the rates decay towards the end), and settings of saving, logging and memory,
        may change.

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
