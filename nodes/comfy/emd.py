"""What the EMD nodes need of ComfyUI's insides: students with their LoRA, roles that share one network, latents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import comfy.sample
import comfy.utils
import folder_paths
import torch

from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.emd import StudentContract, check_names, read_student
from ...engine.errors import refuse
from ...engine.noise import seeded_noise
from ...engine.portraits.shipped import STUDENT_FOLDER
from ...engine.progress import Progress
from . import model as bridge

if TYPE_CHECKING:
    from ...engine.emd.train import EMDTrainConfig

NONE = "(the model is the student)"

if STUDENT_FOLDER.is_dir():  # the shipped student and its score adapter, for this pack's nodes and for Load LoRA
    folder_paths.add_model_folder_path("loras", str(STUDENT_FOLDER))


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


def bases() -> list[str]:
    """The portraits model and the folders in models/diffusers."""
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    return ["portraits", *sorted(p.parent.name for root in roots for p in root.glob("*/model_index.json"))]


def distil(
    base: str, prompts: list[str], name: str, config: EMDTrainConfig, progress: Progress
) -> tuple[torch.Tensor, Path]:
    """Train in output/vitrine_emd/<name>; IMAGE (4, H, W, 3) of the student and its kohya file.

    Raises:
        VitrineError: a name that leaves the folder.
    """
    from ...engine.emd.train import Trainer
    from ...engine.pipelines.emd_training import training_parts

    if not name or name != Path(name).name or name.startswith("."):
        raise refuse("name", name, "a plain folder name", "leave out slashes and leading dots")
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    found = next((str(root / base) for root in roots if (root / base / "model_index.json").is_file()), base)
    folder = Path(folder_paths.get_output_directory()) / "vitrine_emd" / name
    with torch.inference_mode(False), torch.enable_grad():
        parts = training_parts({"model": found, "prompts": prompts, "base": base})
        trainer = Trainer(
            parts.teacher, parts.conditions, parts.shape, config, folder, parts.null, parts.contract, parts.decode
        )
        file = trainer.run(progress)[0]
        with torch.no_grad():
            z = seeded_noise([0, 1, 2, 3], parts.shape).to(trainer.device)
            cond = parts.conditions.take(torch.arange(4) % trainer.count).to(trainer.device)
            pictures = parts.decode(trainer.generate(z, cond))
    return pictures.permute(0, 2, 3, 1).cpu(), file
