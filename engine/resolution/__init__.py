"""Resolution transfer (Berrada et al. 2024): noise schedule, positions and guidance for another image size."""

from .plan import ModelFacts, Plan, Positions, plan_transfer
from .posembed import StoredGrid, rebuilt_table, recover_grid
from .shift import relabel, resample, scaled_guidance, shift_abar, shift_grid, shift_tau, size_ratio
from .transfer import Applied, apply, facts_of, transferred_copy
from .transfer_config import ResolutionTransferConfig, TrainedSchedule, read_metadata

__all__ = [
    "Applied", "ModelFacts", "Plan", "Positions", "ResolutionTransferConfig", "StoredGrid",
    "TrainedSchedule", "apply", "facts_of", "plan_transfer", "read_metadata", "rebuilt_table", "recover_grid",
    "relabel", "resample", "scaled_guidance", "shift_abar", "shift_grid", "shift_tau", "size_ratio",
    "transferred_copy",
]  # fmt: skip
