"""Options of the copy check and of the LoRA report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .option import Option, Options


@dataclass(frozen=True)
class CheckConfig(Options):
    """What is sampled for a copy check. Searches and verifications use seeds 1 and 101."""

    seeds: Annotated[int, Option("Samples of each prompt.", ge=2, top=256)] = 8
    first_seed: Annotated[int, Option("Of these samples.", ge=0, top=2**31)] = 2000
    usual: Annotated[int, Option("Samples that say which distance is usual.", ge=2, node=False)] = 16
    ordinary: Annotated[
        tuple[str, ...],
        Option(
            "Captions that have nothing to do with the pictures: they say which distance is usual.",
            details="With a LoRA none are needed, as the model without it says what is usual.",
            node=False,
        ),
    ] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ordinary", tuple(self.ordinary))
        super().__post_init__()


@dataclass(frozen=True)
class ReportConfig(Options):
    """How much a report samples."""

    seeds: Annotated[int, Option("Samples of each prompt.", ge=2, top=64)] = 4
    first_seed: Annotated[int, Option("Of these samples.", ge=0, top=2**31, advanced=True)] = 2000
    steps: Annotated[int, Option("Of sampling; four are enough to see a copy.", ge=1, top=100)] = 4
    guidance: Annotated[float, Option("Guidance of these samples.", ge=0, top=100, step=0.1)] = 3.0
    strengths: Annotated[
        tuple[float, ...],
        Option(
            "Of the LoRA, for the strength where copying begins; 1 is always measured.",
            gt=0,
            le=8,
        ),
    ] = (0.25, 0.5, 0.75, 1.25)
    prompts: Annotated[int, Option("Captions that are sampled, at most.", ge=1, top=64, advanced=True)] = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "strengths", tuple(sorted(set(self.strengths) - {1.0})))
        super().__post_init__()
