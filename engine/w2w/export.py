"""A LoRA as a file that loads elsewhere: kohya names (ComfyUI, A1111, diffusers), diffusers names, or a PEFT folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import refuse
from ..files import save_safetensors, write_json
from .manifest import Lora

DIALECTS = ("kohya", "diffusers", "peft")


def kohya(lora: Lora) -> dict[str, torch.Tensor]:
    """``lora_unet_<module>.lora_down|up.weight`` and ``.alpha``, which ComfyUI, A1111 and diffusers read."""
    out: dict[str, torch.Tensor] = {}
    for path, layer in lora.items():
        stem = "lora_unet_" + path.replace(".", "_")
        out[f"{stem}.lora_down.weight"], out[f"{stem}.lora_up.weight"] = layer.down, layer.up
        out[f"{stem}.alpha"] = torch.tensor(float(layer.alpha))
    return out


def diffusers_names(lora: Lora, prefix: str = "unet.") -> dict[str, torch.Tensor]:
    """``unet.<module>.lora_A|B.weight``, the scale multiplied into B: diffusers assumes scale 1 without alpha."""
    out: dict[str, torch.Tensor] = {}
    for path, layer in lora.items():
        out[f"{prefix}{path}.lora_A.weight"] = layer.down
        out[f"{prefix}{path}.lora_B.weight"] = layer.up * layer.scale
    return out


def peft_config(lora: Lora) -> dict:
    """PEFT's adapter_config.json for factors that contain their scale, so that alpha equals each layer's rank."""
    ranks = {path: layer.rank for path, layer in lora.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {path: rank for path, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA", "task_type": None, "r": common, "lora_alpha": common, "rank_pattern": pattern,
        "alpha_pattern": pattern, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(ranks),
        "inference_mode": True,
    }  # fmt: skip


def write_lora(
    path: str | Path,
    lora: Lora,
    dialect: str = "kohya",
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a LoRA file, whole or not at all; for ``peft``, ``path`` is the folder. Existing files are replaced.

    Raises:
        VitrineError: If the dialect is unknown, or the LoRA has no layers.
    """
    if dialect not in DIALECTS:
        raise refuse("dialect", dialect, DIALECTS, "kohya loads in most programs")
    if not lora:
        raise refuse("LoRA", "no layers", "one or more", "sample or load a model first")
    path = Path(path)
    if dialect == "peft":
        write_json(path / "adapter_config.json", peft_config(lora))
        path, tensors = path / "adapter_model.safetensors", diffusers_names(lora, "base_model.model.")
    else:
        tensors = kohya(lora) if dialect == "kohya" else diffusers_names(lora)
    return save_safetensors(path, {k: v.to(dtype) for k, v in tensors.items()}, metadata)
