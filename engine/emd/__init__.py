"""EM Distillation (Xie et al. 2024): train and run one-step generators."""

from .calibration import Calibration, calibrate_gz
from .chain import ChainEnd, EStepConfig, Joint, NoiseLevels, ScoreDifference, e_step
from .export import Student
from .losses import m_step_loss, score_difference, score_loss
from .sampling import Base, FirstSteps, few_steps, noise_scale, one_step
from .students import (
    ONE_STEP,
    PRESETS,
    STUDENTS,
    StudentPreset,
    StudentSampling,
    check_base,
    check_names,
    check_network,
    check_student,
    detect,
    known,
    one_step_of,
    read_student,
)
from .variety import Variety, mean_distance, measure_variety, noisy_text, small_pixels, vendi_score

__all__ = [
    "ONE_STEP", "PRESETS", "STUDENTS", "Base", "Calibration", "ChainEnd", "EStepConfig", "FirstSteps", "Joint",
    "NoiseLevels", "ScoreDifference", "Student", "StudentPreset", "StudentSampling", "Variety", "calibrate_gz",
    "check_base", "check_names", "check_network", "check_student", "detect", "e_step", "few_steps", "known",
    "m_step_loss", "mean_distance", "measure_variety", "noise_scale", "noisy_text", "one_step", "one_step_of",
    "read_student", "score_difference", "score_loss", "small_pixels", "vendi_score",
]  # fmt: skip
