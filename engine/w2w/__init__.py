"""weights2weights (Dravid et al. 2024): a space of models built from LoRAs; sample, edit, invert."""

from .build import BuildConfig, Built, Space, build_space, load_space
from .delta import DeltaSpace
from .export import write_lora
from .gauge import Gauge, gauge_test
from .lora_files import FolderReport, LoraFile, read_header, read_lora, scan_folder
from .manifest import Layer, Lora, LoraLayer, Manifest
from .pca import PCAConfig, principal_components
from .space import WeightSpace

__all__ = [
    "BuildConfig", "Built", "DeltaSpace", "FolderReport", "Gauge", "Layer", "Lora", "LoraFile", "LoraLayer", "Manifest",
    "PCAConfig", "Space", "WeightSpace", "build_space", "gauge_test", "load_space", "principal_components",
    "read_header", "read_lora", "scan_folder", "write_lora",
]  # fmt: skip
