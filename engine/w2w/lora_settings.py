"""LoRA settings that stand outside the tensors: PEFT's adapter_config.json, or a header that diffusers wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import named, parse_table


@dataclass(frozen=True)
class LoraRules:
    """PEFT's settings of one adapter; empty where a file has none."""

    values: Mapping[str, Any]

    def alpha(self, path: str, rank: int) -> float | None:
        """Alpha of a layer; None where nothing says it, and the scale is 1.

        PEFT's rules: the first pattern that fits the end of the module's name, a regular expression, else the common
        alpha; rank-stabilised LoRA divides by sqrt(r). Ranks need no pattern here: the factors have them.
        """
        # of LoHa and LoKr it is called alpha
        alpha = self._fitting("alpha_pattern", path, self.values.get("lora_alpha", self.values.get("alpha")))
        if alpha is None:
            return None
        return float(alpha) * (rank**0.5 if self.values.get("use_rslora") else 1.0)

    def rank(self, path: str) -> int | None:
        """The rank that PEFT divides a layer's alpha by; None where nothing says it. Whole LoKr factors have none."""
        return self._fitting("rank_pattern", path, self.values.get("r"))

    def _fitting(self, patterns: str, path: str, common: Any) -> Any:
        # peft.utils.get_pattern_key
        table = self.values.get(patterns) or {}
        return next((value for name, value in table.items() if re.match(rf"(.*\.)?({name})$", path)), common)


def settings_of(path: Path, metadata: Mapping[str, str]) -> LoraRules:
    """The settings of a LoRA file, from the JSON file beside it or from its header.

    Raises:
        VitrineError: If PEFT's JSON file is damaged, or has impossible alphas or patterns.
    """
    beside = path.with_name("adapter_config.json")
    if path.stem == "adapter_model" and beside.is_file():
        with named(beside, "LoRA settings", "PEFT's JSON file", "export the LoRA again"):
            return _checked(parse_table(beside.read_text(encoding="utf-8")))
    try:
        values = parse_table(metadata.get("lora_adapter_metadata", "{}"))
        starts = ("unet.", "transformer.")
        return _checked({k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(starts)} or values)
    except ValueError:
        return LoraRules({})


def _checked(values: dict[str, Any]) -> LoraRules:
    patterns = values.get("alpha_pattern") or {}
    alphas = (values.get("lora_alpha") or values.get("alpha") or 0, *patterns.values())
    if not all(math.isfinite(float(alpha)) for alpha in alphas):
        raise ValueError(f"alphas {alphas}")
    for pattern in (*patterns, *(values.get("rank_pattern") or {})):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r}: {error}") from error
    return LoraRules(values)
