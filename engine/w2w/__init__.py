"""weights2weights (Dravid et al. 2024): a space of models built from LoRAs; sample, edit, invert."""

from .batched_lora import PAPER_TARGETS, BatchedLora, initial_lora
from .build import BuildConfig, Built, Space, build_space, load_space
from .delta import DeltaSpace
from .directions import Quality, direction, joint_directions, named, quality, reach, score, with_directions, without
from .editing import EditConfig, blend, difference, edit, edited_lora, materialise, share_inside, shift
from .export import write_lora
from .gauge import Gauge, gauge_test
from .inversion import Inversion, InvertConfig, invert, latent_mask
from .lora_files import FolderReport, LoraFile, read_header, read_lora, scan_folder
from .manifest import Layer, Lora, LoraLayer, Manifest
from .model_file import W2WModel
from .pca import PCAConfig, principal_components
from .sampling import Neighbour, SampleConfig, closeness, conditioned, nearest, sample
from .space import WeightSpace
from .train import BatchedTrainer, LoraTrainConfig, Subject, train_loras

__all__ = [
    "PAPER_TARGETS", "BatchedLora", "BatchedTrainer", "BuildConfig", "Built", "DeltaSpace", "EditConfig",
    "FolderReport", "Gauge", "Inversion", "InvertConfig", "Layer", "Lora", "LoraFile", "LoraLayer",
    "LoraTrainConfig", "Manifest", "Neighbour", "PCAConfig", "Quality", "SampleConfig", "Space", "Subject",
    "W2WModel", "WeightSpace", "blend", "build_space", "closeness", "conditioned", "difference", "direction", "edit",
    "edited_lora", "gauge_test", "initial_lora", "invert", "joint_directions", "latent_mask", "load_space",
    "materialise", "named",
    "nearest", "principal_components", "quality", "reach", "read_header", "read_lora", "sample", "scan_folder",
    "score", "share_inside", "shift", "train_loras", "with_directions", "without", "write_lora",
]  # fmt: skip
