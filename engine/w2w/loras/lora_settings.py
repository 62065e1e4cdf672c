"""LoRA settings outside the tensors: PEFT's adapter_config.json, or a header that diffusers wrote.

They determine what the tensors mean, so only known kinds of adapters and settings are accepted: any
other is refused by name. Patterns of layer names are never executed, see ``name_patterns.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...io.files import named, parse_table
from ...io.number_checks import LARGEST_RANK, integer
from ...io.tables import read_text
from .name_patterns import NameTable

SETTINGS = "adapter_config.json"
"""PEFT's settings, next to the file."""
KINDS = ("LORA", "ADALORA", "LOHA", "LOKR")
"""Supported adapter kinds of PEFT."""
LARGEST_ALPHA = 1e6
"""Largest alpha of any trainer; a larger one means a damaged or malicious file."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "true", "false")
"""Initialisations that keep the base weights; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them."""
_HARMLESS = {
    "adapter_name", "alpha", "alpha_pattern", "auto_mapping", "base_model_class", "base_model_name_or_path", "beta1",
    "beta2", "bias", "corda_config", "decompose_both", "decompose_factor", "deltaT", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "init_r", "init_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_core", "module_dropout", "modules_to_save", "orth_reg_weight", "parent_library", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_dropout", "rank_dropout_scale", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_r", "task_type", "tfinal", "tinit", "total_step",
    "trainable_token_indices", "unsloth_fixed", "use_dora", "use_effective_conv2d", "use_rslora", "velora_config",
}  # fmt: skip
"""Settings that do not change the meaning of the factors, or that are read here."""
_NAMES = {
    "kasa_config": "KaSA",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QA-LoRA",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "fan_in_fan_out": "transposed weights",
}


@dataclass(frozen=True)
class LoraRules:
    """PEFT's settings of one adapter; empty if a file has none. alphas, ranks: of single layers."""

    values: Mapping[str, Any]
    alphas: NameTable = field(default_factory=lambda: NameTable({}))
    ranks: NameTable = field(default_factory=lambda: NameTable({}))

    @property
    def adaptive(self) -> float | None:
        """AdaLoRA's scale of every layer, lora_alpha / init_r; None if the settings are not AdaLoRA's."""
        if str(self.values.get("peft_type", "")).upper() != "ADALORA":
            return None
        alpha, rank = float(self.values.get("lora_alpha", 8)), float(self.values.get("init_r", 12))
        return (alpha if alpha > 0 else rank) / (rank + 1e-5)  # peft.tuners.adalora.layer.SVDLinear

    def alpha(self, path: str, rank: int) -> float | None:
        """Alpha of a layer; None if it is not given, and the scale is 1.

        PEFT's rules: the first pattern that matches the end of the module's name, else the common alpha;
        rank-stabilised LoRA divides by sqrt(r). Ranks need no pattern here: the factors have them.
        """
        # for LoHa and LoKr it is called alpha
        alpha = self.alphas.value(path, self.values.get("lora_alpha", self.values.get("alpha")))
        if alpha is None:
            return None
        return float(alpha) * (rank**0.5 if self.values.get("use_rslora") else 1.0)

    def rank(self, path: str) -> int | None:
        """The rank by which PEFT divides a layer's alpha; None if it is not given. Full LoKr factors have none."""
        return self.ranks.value(path, self.values.get("r"))


def settings_of(path: Path, metadata: Mapping[str, str], keys: Sequence[str] = ()) -> LoraRules:
    """The settings of a LoRA file, from the JSON file next to it or from its header.

    Args:
        keys: of the file; those of PEFT's own format tell a renamed ``adapter_model.safetensors``.

    Raises:
        VitrineError: If PEFT's JSON file is damaged.
        ValueError: If an alpha, a rank or a pattern is impossible, or a kind or a setting is not understood.
    """
    settings_file = path.with_name(SETTINGS)
    if settings_file.is_file() and (path.stem == "adapter_model" or _renamed(path, keys)):
        with named(settings_file, "LoRA settings", "PEFT's JSON file", "export the LoRA again"):
            return _checked(parse_table(read_text(settings_file)))
    values = parse_table(metadata.get("lora_adapter_metadata", "{}"))
    starts = ("unet.", "transformer.")
    return _checked({k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(starts)} or values)


def _renamed(path: Path, keys: Sequence[str]) -> bool:
    """Whether a file is PEFT's under another name, and the only one that the settings in its folder can be of."""
    of_peft = bool(keys) and all(key.startswith("base_model.model.") for key in keys)
    return of_peft and len(list(path.parent.glob("*.safetensors"))) == 1


def _checked(values: dict[str, Any]) -> LoraRules:
    kind = str(values.get("peft_type") or "LORA").rsplit(".", 1)[-1].upper()
    if kind not in KINDS:
        raise ValueError(f"is {kind} (peft_type), whose tensors are no LoRA's")
    start = values.get("init_lora_weights")
    if start not in _STARTS:
        raise ValueError(f"starts as {start} (init_lora_weights), which changes the base weights: convert it to a LoRA")
    strange = [name for name, value in values.items() if value and name not in _HARMLESS]
    if strange:
        shown = ", ".join(f"{_NAMES[name]} ({name})" if name in _NAMES else name for name in strange[:5])
        raise ValueError(f"has unknown settings: {shown}")
    patterns, ranks = (_table(values, name) for name in ("alpha_pattern", "rank_pattern"))
    ranks = {} if kind == "ADALORA" else ranks  # there it says which ranks remain
    for alpha in (values.get("lora_alpha"), values.get("alpha"), *patterns.values()):
        check_alpha(0.0 if alpha is None else float(alpha))
    for rank in (values.get("r"), values.get("init_r"), *ranks.values()):
        if rank is not None:
            integer(rank, "rank", 1, LARGEST_RANK)
    # peft.utils.get_pattern_key
    return LoraRules(values, NameTable(patterns), NameTable(ranks))


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name) or {}
    if not isinstance(table, dict):
        raise ValueError(f"{name} is not a table")
    return table


def check_alpha(alpha: float) -> float:
    """The alpha itself, if it is a finite number; how large it may be is known with the change that it scales.

    Raises:
        ValueError: If it is not finite, or far beyond what any trainer writes for a kind without a rank.
    """
    if not math.isfinite(alpha) or abs(alpha) > LARGEST_ALPHA * LARGEST_ALPHA:
        raise ValueError(f"alpha {alpha:g}")
    return alpha
