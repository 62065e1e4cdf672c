"""Further shipped files of the portraits models: transformers, one-step students, and spaces of people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from .flow import FLOW_WEIGHTS
from .models import WEIGHTS

TRANSFORMERS = WEIGHTS / "transformer"
STUDENT_FOLDER = WEIGHTS / "emd"
"""A folder of LoRAs: its files are in the subfolder ``vitrine``, so that lists of LoRAs show them in a folder."""
PEOPLE_SPACE = WEIGHTS / "w2w" / "people.w2w.safetensors"
"""520 people of the portraits dataset as a space of LoRAs; ``vitrine.engine.w2w.load_space`` opens it."""
FLOW_PEOPLE_SPACE = WEIGHTS / "w2w" / "flow-people.w2w.safetensors"
"""A space for people of the flow portraits."""
PEOPLE_LORAS = WEIGHTS / "w2w" / "loras"
"""Forty people as LoRA files, twenty with glasses: a folder to build a space from."""
STUDENTS = {
    "student": "EM Distillation, K = 4",
    "diff-instruct": "the baseline: Diff-Instruct, trained for the same number of steps",
}


def shipped_models() -> dict[str, Path]:
    """Folders of the text-to-image models that ship, by name: the 64 px UNet first, then the flow model if it ships."""
    folders = {"portraits, 64 px": WEIGHTS, "flow portraits, 128 px": FLOW_WEIGHTS}
    return {name: folder for name, folder in folders.items() if (folder / "model_index.json").is_file()}


def transformer_folder(name: str | Path = "power-cosine") -> Path:
    """The folder of a shipped transformer by name; a path to a folder is returned unchanged."""
    folder = Path(name) if Path(name).is_dir() else TRANSFORMERS / str(name)
    if not (folder / "config.json").is_file():
        raise refuse(
            "portraits transformer",
            str(name),
            shipped_transformers(),
            "the recipe `sizes` makes one",
        )
    return folder


def shipped_transformers() -> list[str]:
    """Names of the transformers that ship."""
    return sorted(p.parent.name for p in TRANSFORMERS.glob("*/config.json"))


def load_transformer(name: str | Path = "power-cosine") -> Any:
    """A shipped transformer by name, or one from a folder, in float32."""
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel.from_pretrained(transformer_folder(name), torch_dtype=torch.float32).eval()


def student_file(name: str = "student") -> Path:
    """The LoRA file of a shipped student (kohya names, student preset in its header)."""
    path = STUDENT_FOLDER / "vitrine" / f"vitrine-portraits-emd-{name}.safetensors"
    if name not in STUDENTS or not path.is_file():
        raise refuse("student", name, sorted(STUDENTS), "vitrine emd train makes one")
    return path
