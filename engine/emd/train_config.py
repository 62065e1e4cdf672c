"""Settings of a distillation run."""

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
    """Settings of a run that rarely change.

    Attributes:
        auto_gz: measure gz and the clip of the chain at the start (:func:`~vitrine.engine.emd.calibrate_gz`). A chain
            whose gz is 0 keeps z frozen.
        weight: of the M-step, ``uniform`` (Xie et al.) or ``dmd``.
        ema: decay of the exported average of the generator, in [0, 1).
        decay: share of the run, at its end, over which both learning rates fall to zero; 0 keeps them.
        dtype: of the frozen networks; chain, trained weights and Adam are float32 whatever it is.
        checkpointing: recompute activations in the backward pass: less memory, one more forward.
        save_every: steps between saves of the state.
        grid_every: steps between sample grids (0: never); the trainer needs ``decode`` then.
        meter_every: steps between readings of the bias meter (0: never).
        log_every: steps between rows of log.csv, and of TensorBoard where it is installed (0: never).
        accumulate: batches whose gradients make one update.
        keep: exports of the generator that are kept, the last ones of those made at each save (0: the final one only).
        objective: of the generator: ``emd``, or ``sid`` for the loss of :func:`~vitrine.engine.emd.sid_loss`, of flow
            teachers alone; the chain and ``weight`` are not used then.
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
            raise refuse("objective", self.objective, OBJECTIVES, "emd is Xie et al.'s")
        rare = (self.grid_every, self.meter_every, self.log_every, self.keep)
        if min(rare) < 0:
            raise refuse("grid_every, meter_every, log_every, keep", rare, "0 or more", "0 is never")

    def essential(self) -> EMDAdvancedConfig:
        """What the weights depend on; how often the run is saved or looked at, and memory, are at their defaults."""
        default = EMDAdvancedConfig()
        return replace(
            self, save_every=default.save_every, grid_every=default.grid_every, meter_every=default.meter_every,
            checkpointing=default.checkpointing, log_every=default.log_every, keep=default.keep,
        )  # fmt: skip


@dataclass(frozen=True)
class EMDTrainConfig(Config):
    """Settings of a run.

    Attributes:
        steps: generator updates.
        batch: rows of each update, shared by all processes.
        timestep: t*, where the generator starts from the teacher; 0 is where all is noise: 999, of a flow 1000.
        rank: of both adapters.
        chain: the E-step; ``EStepConfig.diff_instruct()`` is the baseline.
        score_updates: score updates before each generator update.
        lr_generator, lr_score: Adam with betas (0, 0.99). 1e-4 suits a LoRA generator, 2e-6 a full one.
        guidance: of the teacher.
        seed: of the whole run.
        student: ``lora``, or ``full`` for a generator with all weights of its own.
        score: the same for the score network.
        score_rank: of its adapter; 0 takes ``rank``.
        advanced: what rarely changes. In a dict (a training file, say) its settings may stand beside the others.
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
        """Refuse what a run by so many processes cannot do.

        Raises:
            VitrineError: They cannot share the batch, or there is nothing to decode wanted grids with.
        """
        if self.batch % processes:
            accepted = f"a multiple of {processes}, the processes"
            raise refuse("batch", self.batch, accepted, "they share each batch")
        every = self.advanced.grid_every
        if every and not decodes:
            raise refuse("grid_every", every, "0 without decode", "pass decode=, latents to pictures")

    @property
    def full(self) -> tuple[str, ...]:
        """The roles that have all weights of their own."""
        return tuple(role for role, kind in (("generator", self.student), ("score", self.score)) if kind == "full")

    def beginning(self, last: float) -> EMDTrainConfig:
        """The same with t* said: where it is not, ``last``, the schedule's timestep of most noise."""
        return self if self.timestep else replace(self, timestep=float(last))

    def differences(self, other: EMDTrainConfig, chain: EStepConfig | None = None) -> list[str]:
        """What keeps a run begun with ``other`` from going on with these: settings that its weights depend on.

        How long it is (unless the rates fall towards its end), how often it is saved or looked at, and how memory is
        spared may change.

        Args:
            chain: what that run walked, with gz as it was measured. These settings may measure too, or give that gz.
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
