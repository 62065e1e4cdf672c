"""Control conditioning (Berrada et al. 2024): size, crop and flip conditions with a noise-dependent weight."""

from .checkpoint import ControlCheckpoint, ControlMetadata, ControlWarning, load_control, save_control, trained_settings
from .control_trainer import AdvancedControlTrainConfig, ControlTrainConfig, ControlTrainer, TrainSetup
from .cross_size import CrossSizeResult, cross_size_consistency, rms_distance
from .embedder import ControlEmbedder, sinusoid
from .embedding_hook import AddedVector, Injection, control_width, injected, time_embedding
from .entropy_guidance import EntropyConfig
from .gamma import CLOCKS, DRAWN, FORMS, GammaConfig, gamma, half_weight_time
from .padding import PaddingConfig, pad_text
from .records import AugmentConfig, ControlRecord, augment
from .reference_blend import ReferenceBlend, added_delta, blend, reference_input, weighted_delta
from .size_condition import SizeCondition
from .size_guidance import ControlStep, GuidanceConfig, Guided, control_guidance, needed_evaluations
from .spec import ControlField, ControlSpec

__all__ = [
    "CLOCKS", "DRAWN", "FORMS", "AddedVector", "AdvancedControlTrainConfig", "AugmentConfig", "ControlCheckpoint",
    "ControlEmbedder", "ControlField", "ControlMetadata", "ControlRecord", "ControlSpec", "ControlStep",
    "ControlTrainConfig", "ControlTrainer", "ControlWarning", "CrossSizeResult", "EntropyConfig", "GammaConfig",
    "GuidanceConfig", "Guided", "Injection", "PaddingConfig", "ReferenceBlend", "SizeCondition", "TrainSetup",
    "added_delta", "augment", "blend", "control_guidance", "control_width", "cross_size_consistency", "weighted_delta",
    "gamma", "half_weight_time", "injected", "load_control", "needed_evaluations", "pad_text",
    "reference_input", "rms_distance", "save_control", "sinusoid", "time_embedding", "trained_settings",
]  # fmt: skip
