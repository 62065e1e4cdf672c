"""What the EMD nodes need of ComfyUI's insides: students with their LoRA, roles that share one network, latents."""

from __future__ import annotations

import os
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import comfy.sample
import comfy.utils
import folder_paths
import torch

from ..engine.denoiser import Condition, Denoiser
from ..engine.emd import StudentContract, check_names, read_student
from ..engine.errors import refuse
from . import bridge

NONE = "(the model is the student)"


def student_files() -> list[str]:
    """LoRA files on offer, after the entry that means none."""
    return [NONE, *folder_paths.get_filename_list("loras")]


def contract_in(name: str) -> StudentContract:
    """The contract in a LoRA file's header.

    Raises:
        VitrineError: no file chosen, no contract, or PEFT names.
    """
    if name == NONE:
        raise refuse("contract", "auto without a student file", "a student file with a header", "choose a preset")
    return read_student(folder_paths.get_full_path_or_raise("loras", name))[0]


def with_lora(model: Any, name: str) -> Any:
    """A clone with a LoRA file at strength 1; every key must fit.

    Raises:
        VitrineError: PEFT names, or a LoRA of another architecture.
    """
    if name == NONE:
        return model
    tensors = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("loras", name), safe_load=True)
    check_names(tensors, os.path.basename(name))
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    found = comfy.lora.load_lora(comfy.lora_convert.convert_lora(tensors), keys)
    wanted = {k.split(".")[0] for k in tensors if k.endswith("lora_down.weight")}
    clone = model.clone()
    applied = clone.add_patches(found, 1.0)
    if not applied or len(set(applied)) < len(wanted):
        given = f"{len(set(applied))} of {len(wanted)} layers of {os.path.basename(name)} fit"
        raise refuse("student LoRA", given, "a LoRA of this base model", "load the base it was distilled from")
    return clone


def role_of(model: Any) -> Denoiser:
    """A Denoiser that loads its own clone before each call: clones share one network, and only one is in it."""
    denoiser = bridge.denoiser_of(model)

    def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        comfy.model_management.load_models_gpu([model])
        return denoiser.call(x_t, t, cond)

    return denoiser.with_call(call)


def room_for(model: Any, latent: dict) -> torch.Tensor:
    """Zeros of the LATENT's size, with the model's channels, on its device."""
    ratios = (latent.get(f"downscale_ratio_{kind}") for kind in ("spacial", "temporal"))  # ComfyUI's spelling
    samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"], *ratios)
    return torch.zeros(samples.shape, device=model.load_device)


def latent_of(model: Any, x0: torch.Tensor) -> dict:
    """LATENT, unscaled as ComfyUI keeps it."""
    return {"samples": model.model.process_latent_out(x0.float()).to(comfy.model_management.intermediate_device())}
