"""EM Distillation (Xie et al. 2024): train and run one-step generators, repair samples by MCMC."""

from .chain import ChainEnd, Gap, Joint, NoiseLevels, e_step
from .config import EStepConfig
from .contract import PRESETS, StudentContract, check_base, check_names, check_network, read_student
from .losses import calibrate_gz, m_step_loss, score_gap, score_loss
from .onestep import CorrectConfig, Networks, RepairWarning, correct, noise_scale, one_step, repair_guidance

__all__ = [
    "PRESETS", "ChainEnd", "CorrectConfig", "EStepConfig", "Gap", "Joint", "Networks", "NoiseLevels",
    "RepairWarning", "StudentContract", "calibrate_gz", "check_base", "check_names", "check_network", "correct",
    "e_step", "m_step_loss", "noise_scale", "one_step", "read_student", "repair_guidance", "score_gap", "score_loss",
]  # fmt: skip
