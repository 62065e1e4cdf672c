"""A trained student as a file: a LoRA in kohya names (ComfyUI) and in diffusers names, or a whole UNet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import refuse
from ..files import save_safetensors
from .contract import StudentContract


def kohya(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``lora_unet_<module>.lora_down|up.weight`` and ``.alpha`` (equal to the rank: scale 1)."""
    out: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        module, part = _split(key, name)
        stem = "lora_unet_" + module.replace(".", "_")
        out[f"{stem}.lora_{'down' if part == 'A' else 'up'}.weight"] = value
        if part == "A":
            out[f"{stem}.alpha"] = torch.tensor(float(value.shape[0]))
    return out


def from_kohya(
    tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], name: str
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`kohya` for adapters of the names and shapes of ``like``; alpha goes into lora_B.

    Raises:
        VitrineError: other layers, or another rank.
    """
    out: dict[str, torch.Tensor] = {}
    for key, own in like.items():
        module, part = _split(key, name)
        stem = "lora_unet_" + module.replace(".", "_")
        given = tensors.get(f"{stem}.lora_{'down' if part == 'A' else 'up'}.weight")
        if given is None or given.shape != own.shape:
            found = "nothing" if given is None else tuple(given.shape)
            remedy = "set rank to the file's, and take a student of the same model"
            raise refuse(f"LoRA layer {module}", found, tuple(own.shape), remedy)
        down = tensors[f"{stem}.lora_down.weight"]
        scale = float(tensors.get(f"{stem}.alpha", torch.tensor(float(len(down))))) / len(down)
        out[key] = given.float() * (scale if part == "B" else 1.0)
    return out


def diffusers_names(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``unet.<module>.lora_A|B.weight``; without alpha diffusers takes the rank, which is right here."""
    parts = ((*_split(k, name), v) for k, v in weights.items())
    return {f"unet.{module}.lora_{part}.weight": v for module, part, v in parts}


def _split(key: str, name: str) -> tuple[str, str]:
    module, rest = key.split(".lora_", 1)
    return module, rest.split(f".{name}.", 1)[0]


def export(
    folder: str | Path, weights: dict[str, torch.Tensor], name: str, contract: StudentContract, half: bool = True
) -> tuple[Path, ...]:
    """Write ``<name>_kohya.safetensors`` and ``<name>_diffusers.safetensors``, both with the contract."""
    if half:
        weights = {k: v.half() for k, v in weights.items()}
    files = {"kohya": kohya(weights, name), "diffusers": diffusers_names(weights, name)}
    meta = contract.to_metadata() | {"vitrine.role": name}
    made = [
        save_safetensors(Path(folder) / f"{name}_{kind}.safetensors", tensors, meta) for kind, tensors in files.items()
    ]
    return tuple(made)


def export_full(
    folder: str | Path, weights: dict[str, torch.Tensor], name: str, contract: StudentContract, half: bool = True
) -> tuple[Path, ...]:
    """Write ``<name>_unet.safetensors``: the whole network in diffusers names, with the contract."""
    tensors = {k: v.half() if half else v for k, v in weights.items()}
    return (
        save_safetensors(
            Path(folder) / f"{name}_unet.safetensors", tensors, contract.to_metadata() | {"vitrine.role": name}
        ),
    )
