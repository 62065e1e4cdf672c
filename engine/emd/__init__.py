"""EM Distillation (Xie et al. 2024): train and run one-step generators, repair samples by MCMC."""

from .calibration import Calibration, calibrate_gz
from .chain import ChainEnd, Joint, NoiseLevels, ScoreDifference, e_step
from .chain_config import EStepConfig
from .few_steps import Base, FirstSteps, few_steps
from .losses import m_step_loss, score_difference, score_loss
from .onestep import CorrectConfig, Networks, RepairWarning, correct, noise_scale, one_step, repair_guidance
from .published_students import ONE_STEP, STUDENTS, StudentSampling, check_student, detect, known
from .sid import Scores, sid_loss
from .student_preset import PRESETS, StudentPreset, check_base, check_names, check_network, read_student
from .variety import Variety, mean_distance, measure_variety, noisy_text, small_pixels, vendi_score

__all__ = [
    "ONE_STEP", "PRESETS", "STUDENTS", "Base", "Calibration", "ChainEnd", "CorrectConfig", "EStepConfig",
    "FirstSteps", "ScoreDifference", "Joint", "Networks", "NoiseLevels", "RepairWarning", "Scores", "StudentPreset",
    "StudentSampling", "Variety", "calibrate_gz", "check_base", "check_names", "check_network", "check_student",
    "correct", "detect", "e_step", "few_steps", "known", "m_step_loss", "mean_distance", "measure_variety",
    "noise_scale", "noisy_text", "one_step", "read_student", "repair_guidance", "score_difference", "score_loss",
    "sid_loss", "small_pixels", "vendi_score",
]  # fmt: skip
