"""NEMO (Hintersdorf et al. 2024): find the cross-attention value neurons that memorize, block them, prove it."""

from .block import BlockConfig, bake, block
from .check import CheckConfig, CheckedPrompt, CopyCheck, Instruments, Pictures, check_copies
from .check_page import write_check
from .config import PAPER_TAU, ProbeConfig, SearchConfig
from .consensus import consensus, jaccard
from .copies import Copies, picture_distance
from .erase import EraseConfig, Erased, EraseData, erase
from .find import Result, find_neurons, make_probe, score_prompts
from .held import held_by
from .kept import keep_scores, kept_scores
from .neurons import NeuronSet, fingerprint_of
from .pull import Pull, PullConfig, prompt_scores, pull
from .score import Score, threshold
from .sites import value_activations, value_sites
from .statistics import NeuronStatistics, RunningStatistics, gather
from .verify import AttackConfig, Verification, VerifyConfig, adversarial_embedding, verify

__all__ = [
    "AttackConfig", "BlockConfig", "CheckConfig", "CheckedPrompt", "Copies", "CopyCheck", "EraseConfig", "EraseData",
    "Erased", "Instruments", "NeuronSet", "NeuronStatistics", "PAPER_TAU", "Pictures", "ProbeConfig", "Pull",
    "PullConfig", "Result", "RunningStatistics", "Score", "SearchConfig", "Verification", "VerifyConfig",
    "adversarial_embedding", "bake", "block", "check_copies", "consensus", "erase", "find_neurons", "fingerprint_of",
    "gather", "held_by", "jaccard", "keep_scores", "kept_scores", "make_probe", "picture_distance", "prompt_scores",
    "pull", "score_prompts", "threshold", "value_activations", "value_sites", "verify", "write_check",
]  # fmt: skip
