"""Writes LoRAs as files that other programs load.

kohya names load in ComfyUI, A1111 and diffusers; the others are diffusers names, or a PEFT folder.

The right names depend on the network: UNets and transformers have different prefixes, and the modules of a
transformer keep the names of the files its space was built from, diffusers' or ComfyUI's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import refuse
from .files import save_safetensors, write_json
from .lora_layer import Lora, LoraLayer
from .number_checks import all_finite


def of_peft(weights: Mapping[str, torch.Tensor]) -> dict[str, LoraLayer]:
    """PEFT's tensors, ``<module>.lora_A.<adapter>.weight`` and ``lora_B``, of an adapter whose alpha is its rank."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        module, side = key.split(".lora_", 1)
        halves.setdefault(module, {})[side[0]] = value
    return {path: LoraLayer(half["A"], half["B"], float(len(half["A"]))) for path, half in halves.items()}


DIALECTS = ("auto", "kohya", "diffusers", "peft")
_UNET = ("down_blocks", "up_blocks", "mid_block", "conv_in", "conv_out", "time_embedding", "add_embedding")
_COMFYUI = ("double_blocks", "single_blocks", "joint_blocks", "blocks")
"""First components of paths in UNets, and in transformers with ComfyUI's names; others are diffusers' transformers."""


def usual_dialect(lora: Lora) -> str:
    """The names that most programs load: kohya, or diffusers' for a transformer with diffusers' module names."""
    roots = {path.split(".")[0] for path in lora}
    known = roots & {*_UNET, *_COMFYUI} or any(".qkv" in path for path in lora)
    return "kohya" if known else "diffusers"


def kohya(lora: Lora) -> dict[str, torch.Tensor]:
    """``lora_unet_<module>.lora_down|up.weight`` and ``.alpha``, which ComfyUI, A1111 and diffusers read."""
    if usual_dialect(lora) != "kohya":
        shown = f"kohya for {next(iter(lora))}"
        raise refuse("dialect", shown, "auto, diffusers or peft", "ComfyUI loads a transformer's diffusers names too")
    out: dict[str, torch.Tensor] = {}
    for path, layer in lora.items():
        stem = "lora_unet_" + path.replace(".", "_")
        out[f"{stem}.lora_down.weight"], out[f"{stem}.lora_up.weight"] = layer.down, layer.up
        out[f"{stem}.alpha"] = torch.tensor(float(layer.alpha))
    return out


def diffusers_names(lora: Lora, prefix: str | None = None) -> dict[str, torch.Tensor]:
    """``<prefix><module>.lora_A|B.weight``, the scale multiplied into B: diffusers assumes scale 1 without alpha.

    Args:
        prefix: None chooses ``unet.`` or ``transformer.`` by the network.
    """
    roots = {path.split(".")[0] for path in lora}
    if prefix is None and not roots & set(_UNET) and usual_dialect(lora) == "kohya":
        shown = f"diffusers for {next(iter(lora))}"
        raise refuse("dialect", shown, "auto or kohya", "the space was built from files with ComfyUI's names")
    prefix = ("unet." if roots & set(_UNET) else "transformer.") if prefix is None else prefix
    out: dict[str, torch.Tensor] = {}
    for path, layer in lora.items():
        out[f"{prefix}{path}.lora_A.weight"] = layer.down
        out[f"{prefix}{path}.lora_B.weight"] = layer.up * layer.scale
    return out


def usual_names(lora: Lora) -> dict[str, torch.Tensor]:
    """The tensors under the names of :func:`usual_dialect`."""
    return kohya(lora) if usual_dialect(lora) == "kohya" else diffusers_names(lora)


def peft_config(lora: Lora) -> dict:
    """PEFT's adapter_config.json for factors with the scale multiplied in: alpha equals each layer's rank."""
    ranks = {path: layer.rank for path, layer in lora.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {path: rank for path, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "r": common,
        "lora_alpha": common,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "inference_mode": True,
    }


def _finite(layer: LoraLayer) -> bool:
    return all_finite(layer.down) and all_finite(layer.up) and math.isfinite(layer.alpha)


def write_lora(
    path: str | Path,
    lora: Lora,
    dialect: str = "auto",
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a LoRA file atomically; for ``peft``, ``path`` is the folder. Existing files are replaced.

    Args:
        dialect: ``auto`` is the one that most programs load, see :func:`usual_dialect`.
        dtype: of the factors; alphas keep their dtype.
    """
    if dialect not in DIALECTS:
        raise refuse("dialect", dialect, DIALECTS, "auto loads in most programs")
    if not isinstance(lora, Mapping):
        raise refuse("LoRA", type(lora).__name__, "layers by name", "write_lora(path, materialise(space, model))")
    if not lora:
        raise refuse("LoRA", "no layers", "one or more", "sample or load a model first")
    broken = [name for name, layer in lora.items() if not _finite(layer)]
    if broken:
        raise refuse("LoRA", f"NaN or Inf in {broken[0]}", "finite numbers", "check the step that made this LoRA")
    path = Path(path)
    if dialect == "peft":
        write_json(path / "adapter_config.json", peft_config(lora))
        path, tensors = path / "adapter_model.safetensors", diffusers_names(lora, "base_model.model.")
    else:
        write = {"auto": usual_names, "kohya": kohya, "diffusers": diffusers_names}[dialect]
        tensors = write(lora)
    # bfloat16 cannot represent a rank of 1279
    narrow = {k: v if k.endswith(".alpha") else v.to(dtype) for k, v in tensors.items()}
    return save_safetensors(path, narrow, metadata)
