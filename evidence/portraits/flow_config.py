"""Settings of the training of the flow portraits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ...engine.config import Config
from ...engine.errors import refuse


@dataclass(frozen=True)
class AdvancedFlowTrainConfig(Config):
    """What rarely changes."""

    vae_batch: int = 4
    """Pictures of one step, for each phase."""
    flow_batch: int = 32
    vae_lr: float = 1.5e-3
    """AdamW's highest rate, for each phase."""
    flow_lr: float = 1.5e-3
    kl_weight: float = 1e-7
    """Of the autoencoder's KL divergence beside its reconstruction error."""
    edge_weight: float = 0.5
    """Of the difference between neighbouring pixels beside the pixels: sharp outlines."""
    plant_share: float = 0.12
    """Share of the planted pictures in each batch."""
    colourings: int = 120
    """Of each planted template."""
    caption_dropout: float = 0.10
    """Share of captions that are emptied, for guidance."""
    time_mean: float = 0.4
    """Of the normal distribution whose logistic function is the time; above 0 leans towards noise."""
    face_weight: float = 2.0
    """How much more the face, the cheeks and the ends of a brim count."""
    ema_decay: float = 0.999
    """Of the moving average of the weights, which is what ships."""
    save_every_seconds: float = 240.0
    """Seconds between two saves of the state."""

    def __post_init__(self) -> None:
        if not 0 <= self.plant_share < 1 or not 0 <= self.caption_dropout < 1:
            raise refuse("share", (self.plant_share, self.caption_dropout), "numbers in [0, 1)", "use 0.12 and 0.10")
        if min(self.vae_batch, self.flow_batch, self.colourings) < 1:
            raise refuse("count", self, "positive counts", "raise the zero one")


@dataclass(frozen=True)
class FlowTrainConfig(Config):
    """Settings of the training of the flow portraits."""

    out: str = "flow-run"
    """Folder for the states of the phases and the finished model."""
    pictures: int = 16_384
    """Rendered training pictures, besides the planted ones."""
    vae_steps: int = 6_000
    """Updates of each phase. A run that stopped early may be given more steps, or fewer."""
    flow_steps: int = 12_000
    card_samples: int = 512
    """Prompts that the finished model's card is measured on; 0 writes no card."""
    max_seconds: float = math.inf
    """Stop after so long; the same command resumes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the networks' arithmetic; weights, averages and losses are float32 in any case."""
    compile: bool = False
    """Run the networks through torch.compile."""
    seed: int = 0
    """Of weights and batches."""
    advanced: AdvancedFlowTrainConfig = field(default_factory=AdvancedFlowTrainConfig)

    def __post_init__(self) -> None:
        if self.pictures < 1:
            raise refuse("count", self, "positive counts", "raise the zero one")
