"""Distillation inside ComfyUI: the folders a teacher can come from, and a run in the output folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
import torch

from ...engine.emd import StudentSampling
from ...engine.errors import refuse
from ...engine.files import write_whole
from ...engine.noise import seeded_noise
from ...engine.pipelines.loading import FLOW, SHIPPED
from ...engine.progress import Progress
from .saved import lora_file

if TYPE_CHECKING:
    from ...engine.emd.train_config import EMDTrainConfig


def bases() -> list[str]:
    """The two portraits models and the folders in models/diffusers."""
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    return [SHIPPED, FLOW, *sorted(p.parent.name for root in roots for p in root.glob("*/model_index.json"))]


def distil(
    base: str, prompts: list[str], name: str, config: EMDTrainConfig, progress: Progress
) -> tuple[torch.Tensor, Path]:
    """Train in output/vitrine_emd/<name>; IMAGE (4, H, W, 3) of the student and its LoRA file.

    The LoRA and that of its score network, ``<name>-score``, are copied to where every loader lists them.

    Raises:
        VitrineError: The name leaves the folder.
    """
    from ...engine.pipelines.emd_training import training_parts

    if not name or name != Path(name).name or name.startswith("."):
        raise refuse("name", name, "a plain folder name", "leave out slashes and leading dots")
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    teacher = next((str(root / base) for root in roots if (root / base / "model_index.json").is_file()), base)
    folder = Path(folder_paths.get_output_directory()) / "vitrine_emd" / name
    scores = [folder / f"score_{names}.safetensors" for names in ("kohya", "diffusers")]  # the latter of a transformer
    with torch.inference_mode(False), torch.enable_grad():
        parts = training_parts(teacher, prompts, base, folder=folder)
        trainer = parts.trainer(config, folder)
        file = _listed(trainer.run(progress)[0], name)
        _listed(next(f for f in scores if f.is_file()), f"{name}-score")
        with torch.no_grad():
            z = seeded_noise([0, 1, 2, 3], parts.shape).to(trainer.device)
            cond = parts.conditions.take(torch.arange(4) % trainer.condition_count).to(trainer.device)
            pictures = parts.decode(trainer.generate(z, cond))
    return pictures.permute(0, 2, 3, 1).cpu(), file


def _listed(file: Path, name: str) -> Path:
    def copy(scratch: str) -> None:
        shutil.copyfile(file, scratch)

    return write_whole(lora_file(name), copy)


def with_prediction(model: Any, prediction: str) -> Any:
    """A clone whose network is taken to predict the clean picture, for the students that do; else the model itself."""
    if prediction != "x0":
        return model
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    return ModelSamplingDiscrete().patch(model, "x0", False)[0]


def refuse_guidance_input(sampling: StudentSampling) -> None:
    """ComfyUI drops the weights by which a full consistency model reads its guidance.

    Raises:
        VitrineError: The student is one of those.
    """
    if sampling.trained_guidance:
        remedy = "take the LCM-LoRA, or the diffusers pipeline"
        raise refuse("student", "one that reads its guidance", "one that does not, in ComfyUI", remedy)
