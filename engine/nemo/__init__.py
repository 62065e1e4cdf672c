"""NEMO (Hintersdorf et al. 2024): find the cross-attention value neurons that memorize, block them, prove it."""

from ..settings.nemo_options import PAPER_TAU, FewStepConfig, ProbeConfig, SearchConfig
from .block import BlockConfig, bake, block
from .blocked_copies import Copies, picture_distance
from .blocking_checks import AttackConfig, Verification, VerifyConfig, adversarial_embedding, verify
from .calibration import PARTS, Calibration, SampleThreshold, ScoreThreshold, threshold
from .few_step_detection import Agreement, FewStepSampler, sample_agreement, sample_threshold
from .find import Result, find_neurons, make_probe, score_prompts
from .neuron_effects import held_by
from .neuron_statistics import NeuronStatistics, RunningStatistics, gather
from .neurons import NeuronSet, fingerprint_of
from .noise_similarity import Score, keep_scores, kept_scores
from .sites import value_activations, value_sites

__all__ = [
    "Agreement", "AttackConfig", "BlockConfig", "Calibration", "Copies",
    "FewStepConfig", "FewStepSampler", "NeuronSet", "NeuronStatistics",
    "PAPER_TAU", "PARTS", "ProbeConfig", "Result", "RunningStatistics", "SampleThreshold",
    "Score", "ScoreThreshold", "SearchConfig", "Verification", "VerifyConfig", "adversarial_embedding", "bake", "block",
    "find_neurons", "fingerprint_of", "gather", "held_by", "keep_scores",
    "kept_scores", "make_probe", "picture_distance", "sample_agreement", "sample_threshold",
    "score_prompts", "threshold", "value_activations", "value_sites", "verify",
]  # fmt: skip
