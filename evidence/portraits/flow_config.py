"""Settings of the training of the flow portraits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...engine.settings.setting_checks import Writes
from .train_config import AdvancedSettings, PhaseSettings, RunSettings, TrainSettings


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
    card_samples: int = 512
    """Prompts that the finished model's card is measured on; 0 writes no card."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the networks' arithmetic; weights, averages and losses are float32 in any case."""
    advanced: AdvancedFlowTrainConfig = field(default_factory=AdvancedFlowTrainConfig)


@dataclass(frozen=True)
class AdvancedDecoderTrainConfig(PhaseSettings):
    """What rarely changes."""

    decoder_batch: int = 4
    """Pictures of one step."""
    decoder_lr: float = 5e-4
    """AdamW's highest rate, of the decoder and its judge."""
    decoder_noise: float = 0.05
    """Deviation of the noise on encoded latents, which are of deviation 1."""
    denoised_until: float = 0.5
    """Highest time that the transformer's latents are denoised from, in one step."""
    edge_weight: float = 0.5
    """Of the difference between neighbouring pixels, relative to the pixels: sharp outlines."""
    colourings: int = 120
    """Of each memorized template."""
    judge_weight: float = 0.5
    """Of the patches' score, as a fraction of the pixels' gradient at the last layer."""
    feature_weight: float = 1.0
    """Of the distance between the judge's features of the decoded and the true picture."""


@dataclass(frozen=True)
class DecoderTrainConfig(RunSettings):
    """Settings of the training of a finished flow model's decoder."""

    out: Annotated[str, Writes("folder")] = "decoder-run"
    """Folder for the state and the finished model."""
    model: str = ""
    """Folder of the flow model; empty is the shipped one."""
    pictures: int = 16_384
    """Rendered training pictures, besides the memorized ones."""
    steps: int = 7_000
    """Updates of the decoder and its judge; the default is the shipped one's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the networks' arithmetic; weights, averages and losses are float32 in any case."""
    advanced: AdvancedDecoderTrainConfig = field(default_factory=AdvancedDecoderTrainConfig)
