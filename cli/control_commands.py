"""`vitrine control train`: the portraits transformer with size, crop and flip. Heavy imports are in `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..engine.settings.setting_checks import Count, OutFolder


@dataclass(frozen=True)
class Train:
    """Train a PixArt-shaped portraits model with one size-weight curve; the same command resumes."""

    weight: Literal["power-cosine", "constant"] = "power-cosine"
    """The paper's curve, or SDXL's constant weight."""
    out: OutFolder = Path("portraits-transformer")
    """Folder for the state and the exported model."""
    pictures: Count = 10_240
    """Training pictures, rendered and encoded first."""
    steps: Count = 10_000
    """Updates."""
    batch: Count = 32
    """Batch size."""
    start: str | None = None
    """A transformer to start from, by name or folder, instead of random weights."""
    lr: float = 1.5e-3
    """Adam's learning rate; falls to zero over the last quarter."""
    lesson: Literal["collection", "sides", "flips"] = "collection"
    """collection: pictures as found; sides: left and right, on unflipped pictures; flips: then the flip condition."""
    stop_after: int | None = None
    """Stop after this many updates in total (the state is saved)."""
    model: str | None = None
    """Folder of a 64 px model, such as that of `vitrine train avataaars`; by default the shipped portraits."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when finished."""
        from ..engine.pipelines.loading import LoadConfig
        from ..engine.portraits.shipped import transformer_folder
        from ..engine.runtime.stages import Stages
        from ..evidence.control.sized_training import TransformerTrainConfig, train_transformer

        if self.start is not None:
            transformer_folder(self.start)  # raises before the pictures are rendered
        config = TransformerTrainConfig(
            self.weight, self.pictures, self.steps, self.batch, self.start, self.lr, self.lesson
        )
        device = LoadConfig(self.device).checked_place
        stages = Stages(dict.fromkeys(("pictures", "training")))
        folder = train_transformer(self.out, config, self.stop_after, stages.bar, device, self.model)
        print(f"model: {folder}")
        return 0


COMMANDS: dict[str, type] = {"train": Train}
