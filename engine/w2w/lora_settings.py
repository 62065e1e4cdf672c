"""LoRA settings that stand outside the tensors: PEFT's adapter_config.json, or a header that diffusers wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import VitrineError
from ..files import named, parse_table
from .name_patterns import NameTable


@dataclass(frozen=True)
class LoraRules:
    """PEFT's settings of one adapter; empty where a file has none. alphas, ranks: of single layers."""

    values: Mapping[str, Any]
    alphas: NameTable = field(default_factory=lambda: NameTable({}))
    ranks: NameTable = field(default_factory=lambda: NameTable({}))

    def alpha(self, path: str, rank: int) -> float | None:
        """Alpha of a layer; None where nothing says it, and the scale is 1.

        PEFT's rules: the first pattern that fits the end of the module's name, else the common alpha;
        rank-stabilised LoRA divides by sqrt(r). Ranks need no pattern here: the factors have them.
        """
        # of LoHa and LoKr it is called alpha
        alpha = self.alphas.value(path, self.values.get("lora_alpha", self.values.get("alpha")))
        if alpha is None:
            return None
        return float(alpha) * (rank**0.5 if self.values.get("use_rslora") else 1.0)

    def rank(self, path: str) -> int | None:
        """The rank that PEFT divides a layer's alpha by; None where nothing says it. Whole LoKr factors have none."""
        return self.ranks.value(path, self.values.get("r"))


def settings_of(path: Path, metadata: Mapping[str, str]) -> LoraRules:
    """The settings of a LoRA file, from the JSON file beside it or from its header.

    Raises:
        VitrineError: If PEFT's JSON file is damaged or has impossible alphas, or either has patterns that are no names.
    """
    beside = path.with_name("adapter_config.json")
    if path.stem == "adapter_model" and beside.is_file():
        with named(beside, "LoRA settings", "PEFT's JSON file", "export the LoRA again"):
            return _checked(parse_table(beside.read_text(encoding="utf-8")))
    try:
        values = parse_table(metadata.get("lora_adapter_metadata", "{}"))
        starts = ("unet.", "transformer.")
        return _checked({k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(starts)} or values)
    except VitrineError:
        raise
    except ValueError:
        return LoraRules({})


def _checked(values: dict[str, Any]) -> LoraRules:
    patterns = values.get("alpha_pattern") or {}
    alphas = (values.get("lora_alpha") or values.get("alpha") or 0, *patterns.values())
    if not all(math.isfinite(float(alpha)) for alpha in alphas):
        raise ValueError(f"alphas {alphas}")
    # peft.utils.get_pattern_key
    return LoraRules(values, NameTable(patterns), NameTable(values.get("rank_pattern") or {}))
