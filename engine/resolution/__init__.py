"""Resolution transfer (Berrada et al. 2024): noise schedule, positions and guidance for another picture size."""

from .config import ResolutionTransferConfig, TrainedSchedule, read_metadata
from .loading import LoadReport, load_matching
from .plan import ModelFacts, Plan, Positions, plan
from .posembed import StoredGrid, rebuilt_table, recover_grid
from .shift import relabel, resample, scaled_guidance, shift_abar, shift_grid, shift_tau, size_ratio
from .transfer import Applied, apply, facts_of, transferred_copy

__all__ = [
    "Applied", "LoadReport", "ModelFacts", "Plan", "Positions", "ResolutionTransferConfig", "StoredGrid",
    "TrainedSchedule", "apply", "facts_of", "load_matching", "plan", "read_metadata", "rebuilt_table", "recover_grid",
    "relabel", "resample", "scaled_guidance", "shift_abar", "shift_grid", "shift_tau", "size_ratio",
    "transferred_copy",
]  # fmt: skip
