"""A trained student as a file: a LoRA in kohya names (ComfyUI) and in diffusers names, or a whole UNet."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .contract import StudentContract


def kohya(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``lora_unet_<module>.lora_down|up.weight`` and ``.alpha`` (equal to the rank: scale 1)."""
    out: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        module, part = _split(key, name)
        stem = "lora_unet_" + module.replace(".", "_")
        out[f"{stem}.lora_{'down' if part == 'A' else 'up'}.weight"] = value.detach().cpu().contiguous().clone()
        if part == "A":
            out[f"{stem}.alpha"] = torch.tensor(float(value.shape[0]))
    return out


def diffusers_names(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``unet.<module>.lora_A|B.weight``; without alpha diffusers takes the rank, which is right here."""
    parts = ((*_split(k, name), v) for k, v in weights.items())
    return {f"unet.{module}.lora_{part}.weight": v.detach().cpu().contiguous().clone() for module, part, v in parts}


def _split(key: str, name: str) -> tuple[str, str]:
    module, rest = key.split(".lora_", 1)
    return module, rest.split(f".{name}.", 1)[0]


def write(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """A safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    save_file(tensors, scratch, metadata)
    os.replace(scratch, path)
    return path


def export(
    folder: str | Path, weights: dict[str, torch.Tensor], name: str, contract: StudentContract, half: bool = True
) -> tuple[Path, ...]:
    """Write ``<name>_kohya.safetensors`` and ``<name>_diffusers.safetensors``, both with the contract."""
    if half:
        weights = {k: v.half() for k, v in weights.items()}
    files = {"kohya": kohya(weights, name), "diffusers": diffusers_names(weights, name)}
    meta = contract.to_metadata() | {"vitrine.role": name}
    made = [write(Path(folder) / f"{name}_{kind}.safetensors", tensors, meta) for kind, tensors in files.items()]
    return tuple(made)


def export_full(
    folder: str | Path, weights: dict[str, torch.Tensor], name: str, contract: StudentContract, half: bool = True
) -> tuple[Path, ...]:
    """Write ``<name>_unet.safetensors``: the whole network in diffusers names, with the contract."""
    tensors = {k: (v.half() if half else v).detach().cpu().contiguous().clone() for k, v in weights.items()}
    return (write(Path(folder) / f"{name}_unet.safetensors", tensors, contract.to_metadata() | {"vitrine.role": name}),)
