"""Settings of a distillation run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..errors import refuse
from .config import EStepConfig
from .losses import WEIGHTS

KINDS = ("lora", "full")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EMDTrainConfig:
    """Settings of a run.

    Attributes:
        steps: generator updates. batch: rows of each, shared by all processes.
        timestep: t*, where the generator starts from the teacher. rank: of both adapters.
        chain: the E-step; ``EStepConfig.diff_instruct()`` is the baseline. auto_gz: measure gz at the start.
        score_updates: score updates before each generator update.
        lr_generator, lr_score: Adam with betas (0, 0.99). 1e-4 suits a LoRA generator, 2e-6 a full one.
        guidance: of the teacher. weight: ``uniform`` or ``dmd``. ema: of the exported generator.
        save_every, meter_every: steps between saves, and between readings of the bias meter (0: never).
        student: ``lora``, or ``full`` for a generator with all weights of its own; the score network is a LoRA in both.
        dtype: of the frozen networks; chain, trained weights and Adam are float32 whatever it is.
        checkpointing: recompute activations in the backward pass: less memory, one more forward.
        grid_every: steps between sample grids (0: never); the trainer needs ``decode`` then.
        decay: share of the run, at its end, over which both rates fall to zero; 0 keeps them.
    """

    steps: int = 2000
    batch: int = 16
    timestep: float = 999.0
    rank: int = 16
    chain: EStepConfig = field(default_factory=EStepConfig)
    auto_gz: bool = True
    score_updates: int = 1
    lr_generator: float = 1e-4
    lr_score: float = 5e-4
    guidance: float = 1.0
    weight: str = "dmd"
    ema: float = 0.999
    seed: int = 0
    save_every: int = 100
    meter_every: int = 0
    student: str = "lora"
    dtype: str = "float32"
    checkpointing: bool = False
    grid_every: int = 0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank", "score_updates", "save_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        if not 0 <= self.ema < 1 or self.weight not in WEIGHTS:
            raise refuse("ema, weight", (self.ema, self.weight), f"0 <= ema < 1, {WEIGHTS}", "0.999 and dmd are usual")
        if not 0 <= self.decay <= 1:
            raise refuse("decay", self.decay, "0 to 1, a share of the run", "0.5 lets the rates fall in its last half")
        if self.student not in KINDS:
            raise refuse("student", self.student, KINDS, "lora is the small one")
        if self.dtype not in DTYPES:
            raise refuse("dtype", self.dtype, sorted(DTYPES), "float16 diverges in such training; use bfloat16")
        if self.grid_every < 0 or self.meter_every < 0:
            given = (self.grid_every, self.meter_every)
            raise refuse("grid_every, meter_every", given, "0 or more", "0 is never")

    def continues(self, other: EMDTrainConfig) -> bool:
        """True if a run begun with ``other`` may go on with these: nothing the weights depend on differs.

        How long it is (unless rates fall towards its end), how often it is saved or looked at, and how memory is
        spared may change.
        """
        free: dict[str, Any] = {"save_every": 1, "meter_every": 0, "grid_every": 0, "checkpointing": False}
        if not self.decay:
            free["steps"] = 1
        return replace(self, **free) == replace(other, **free)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"chain": self.chain.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EMDTrainConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            VitrineError: an unknown setting.
        """
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise refuse("settings", sorted(unknown), sorted(cls.__dataclass_fields__), "remove them")
        chain = values.get("chain", {})
        return cls(**values | {"chain": chain if isinstance(chain, EStepConfig) else EStepConfig.from_dict(chain)})
