"""Settings of the trainings of the portraits, the flow portraits and their decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from ...engine.errors import refuse
from ...engine.settings.config import Config
from ...engine.settings.setting_checks import Writes


@dataclass(frozen=True)
class PhaseSettings(Config):
    """What rarely changes in any phase of training."""

    ema_decay: float = 0.999
    """Of the moving average of the weights, which is what ships."""
    save_every_seconds: float = 240.0
    """Seconds between two saves of the state."""

    def __post_init__(self) -> None:
        counts = [getattr(self, f.name) for f in fields(self) if f.name.endswith(("_batch", "colourings"))]
        if min(counts, default=1) < 1:
            raise refuse("count", self, "positive counts", "raise the zero one")


@dataclass(frozen=True)
class AdvancedSettings(PhaseSettings):
    """What rarely changes in the training of either model."""

    kl_weight: float = 2e-7
    """Of the autoencoder's KL divergence, relative to its reconstruction error."""
    plant_share: float = 0.12
    """Fraction of the memorized pictures in each batch."""
    caption_dropout: float = 0.10
    """Fraction of captions that are emptied, for guidance."""
    face_weight: float = 2.0
    """How much more the face, the cheeks and the ends of a brim count."""

    def __post_init__(self) -> None:
        if not 0 <= self.plant_share < 1 or not 0 <= self.caption_dropout < 1:
            raise refuse("share", (self.plant_share, self.caption_dropout), "numbers in [0, 1)", "use 0.12 and 0.10")
        super().__post_init__()


@dataclass(frozen=True)
class RunSettings(Config):
    """What every training on rendered pictures asks a person."""

    pictures: int = 32_768
    """Rendered training pictures, besides the memorized ones."""
    max_seconds: float = math.inf
    """Stop after so long; the same command resumes."""
    seed: int = 0
    """Of weights and batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def __post_init__(self) -> None:
        if self.pictures < 1:
            raise refuse("count", self, "positive counts", "raise the zero one")


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    """What the training of either model asks a person."""

    vae_steps: int = 6_000
    """Updates of the autoencoder's phase. A run that stopped early may be given other numbers of steps."""
    compile: bool = False
    """Run the networks through torch.compile."""


@dataclass(frozen=True)
class AdvancedTrainConfig(AdvancedSettings):
    """What rarely changes."""

    readout_batch: int = 64
    """Pictures of one step, for each phase."""
    vae_batch: int = 8
    unet_batch: int = 32
    readout_lr: float = 2e-3
    """AdamW's highest rate, for each phase."""
    vae_lr: float = 1.5e-3
    unet_lr: float = 1.5e-3
    snr_weight_limit: float = 4.0
    """Upper limit of the weight 1 / sqrt(SNR)."""


@dataclass(frozen=True)
class TrainConfig(TrainSettings):
    """Settings of the portraits training. The defaults are those of the shipped model."""

    out: Annotated[str, Writes("folder")] = "portraits-run"
    """Folder for the states of the phases and the finished model."""
    readout_steps: int = 3_000
    """Updates of each phase."""
    unet_steps: int = 9_000
    advanced: AdvancedTrainConfig = field(default_factory=AdvancedTrainConfig)


@dataclass(frozen=True)
class AdvancedFlowTrainConfig(AdvancedSettings):
    """What rarely changes."""

    vae_batch: int = 4
    """Pictures of one step, for each phase."""
    flow_batch: int = 32
    vae_lr: float = 1.5e-3
    """AdamW's highest rate, for each phase."""
    flow_lr: float = 1.5e-3
    kl_weight: float = 1e-7
    """Of the autoencoder's KL divergence, relative to its reconstruction error."""
    edge_weight: float = 0.5
    """Of the difference between neighbouring pixels, relative to the pixels: sharp outlines."""
    colourings: int = 120
    """Of each memorized template."""
    time_mean: float = 0.4
    """Of the normal distribution whose logistic function is the time; above 0 leans towards noise."""


@dataclass(frozen=True)
class FlowTrainConfig(TrainSettings):
    """Settings of the training of the flow portraits."""

    out: Annotated[str, Writes("folder")] = "flow-run"
    """Folder for the states of the phases and the finished model."""
    pictures: int = 16_384
    """Rendered training pictures, besides the memorized ones."""
    flow_steps: int = 12_000
    """Updates of the transformer's phase."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the networks' arithmetic; weights, averages and losses are float32 in any case."""
    advanced: AdvancedFlowTrainConfig = field(default_factory=AdvancedFlowTrainConfig)
