"""weights2weights (Dravid et al. 2024): a space of models built from LoRAs, to sample, edit and invert."""

from ..io.lora_layer import Lora, LoraLayer
from ..io.lora_writing import usual_dialect, write_lora
from ..settings.w2w_options import PAPER_TARGETS, InvertConfig
from .building.build_space import BuildConfig, Built, build_space, labels_in, load_space
from .building.folder_summary import FolderLook, look_at_folder
from .building.lora_encoding import Encoded, described, encode, layer_sizes, member, official_model
from .building.map_page import contents, map_page, map_picture
from .edit.coefficient_sampling import (
    Neighbour,
    SampleConfig,
    closeness,
    conditioned,
    nearest,
    sample,
    usual_sampling,
    with_sampling,
)
from .edit.editing import (
    EditConfig,
    blend,
    change_kept,
    difference,
    edit,
    edit_step,
    edited_lora,
    fraction_inside,
    materialise,
    shift,
)
from .edit.inversion import Inversion, invert, invert_below, invert_in, partial_inversion
from .edit.inversion_space import Posterior, latent_mask
from .edit.pair_slider import PairConfig, Pairs, blended, train_pair_slider, with_pair_slider
from .edit.slider import Slider, slider_lora, sliders_of
from .loras.base_weights import BaseWeights
from .loras.gauge import Gauge, gauge_test
from .loras.lora_files import LoraFile, read_header, read_lora
from .loras.lora_folders import FolderScan, scan_folder
from .loras.low_rank import fraction_kept, refactor
from .loras.near_copies import Copy, near_copies
from .space.delta_space import DeltaSpace, Space, member_names
from .space.directions import (
    Quality,
    direction,
    direction_named,
    joint_directions,
    listed,
    one_deviation,
    quality,
    reach,
    score,
    with_directions,
    without,
)
from .space.manifest import Layer, Manifest
from .space.map_layout import SpaceMap, at_place, map_of, mapped, neighbours_of, place_of, with_map
from .space.model_file import W2WModel
from .space.principal_components import PCAConfig, principal_components
from .space.space import WeightSpace
from .train.batched_lora import BatchedLora, initial_lora
from .train.lora_trainer import BatchedTrainer, LoraTrainConfig, Subject, train_loras

__all__ = [
    "BaseWeights", "BatchedLora", "BatchedTrainer", "BuildConfig", "Built", "Copy", "DeltaSpace", "EditConfig",
    "Encoded", "FolderLook", "FolderScan", "Gauge", "Inversion", "InvertConfig", "Layer", "Lora", "LoraFile",
    "LoraLayer", "LoraTrainConfig", "Manifest", "Neighbour", "PAPER_TARGETS", "PCAConfig", "PairConfig", "Pairs",
    "Posterior", "Quality", "SampleConfig", "Slider", "Space", "SpaceMap", "Subject", "W2WModel", "WeightSpace",
    "at_place", "blend", "blended", "build_space", "change_kept", "closeness", "conditioned", "contents",
    "described", "difference", "direction", "direction_named", "edit", "edit_step", "edited_lora", "encode",
    "fraction_inside", "fraction_kept", "gauge_test", "initial_lora", "invert", "invert_below", "invert_in",
    "joint_directions", "labels_in", "latent_mask", "layer_sizes", "listed", "load_space", "look_at_folder",
    "map_of", "map_page", "map_picture", "mapped", "materialise", "member", "member_names", "near_copies",
    "nearest", "neighbours_of", "official_model", "one_deviation", "partial_inversion", "place_of",
    "principal_components", "quality", "reach", "read_header", "read_lora", "refactor", "sample", "scan_folder",
    "score", "shift", "slider_lora", "sliders_of", "train_loras", "train_pair_slider", "usual_dialect",
    "usual_sampling", "with_directions", "with_map", "with_pair_slider", "with_sampling", "without", "write_lora",
]  # fmt: skip
