"""What ships with the pack beside the portraits model: its transformers, one-step students, and a space of people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from .flow import FLOW_WEIGHTS
from .models import WEIGHTS

TRANSFORMERS = WEIGHTS / "transformer"
STUDENT_FOLDER = WEIGHTS / "emd"
"""A folder of LoRAs: its files stand in ``vitrine`` below it, so that a list of LoRAs shows them in a folder."""
PEOPLE_SPACE = WEIGHTS / "w2w" / "people.w2w.safetensors"
"""520 people of the portraits world as a space of LoRAs; ``vitrine.engine.w2w.load_space`` opens it."""
FLOW_PEOPLE_SPACE = WEIGHTS / "w2w" / "flow-people.w2w.safetensors"
"""The same for people of the flow portraits."""
PEOPLE_LORAS = WEIGHTS / "w2w" / "loras"
"""Forty of them as LoRA files, twenty with glasses: a folder to build a space from."""
STUDENTS = {
    "student": "EM Distillation, K = 4",
    "score": "the score adapter trained beside it, for MCMC correction",
    "diff-instruct": "the baseline: Diff-Instruct, trained for as long",
}


def shipped_models() -> dict[str, Path]:
    """Folders of the text-to-image models that ship, by name: the 64 px UNet first, the flow model where it ships."""
    folders = {"portraits, 64 px": WEIGHTS, "flow portraits, 128 px": FLOW_WEIGHTS}
    return {name: folder for name, folder in folders.items() if (folder / "model_index.json").is_file()}


def transformer_folder(name: str | Path = "power-cosine") -> Path:
    """The folder of a shipped transformer by name; a path to a folder is returned unchanged.

    Raises:
        VitrineError: If there is no such model.
    """
    folder = Path(name) if Path(name).is_dir() else TRANSFORMERS / str(name)
    if not (folder / "config.json").is_file():
        raise refuse("portraits transformer", str(name), shipped_transformers(), "`vitrine control train` makes one")
    return folder


def shipped_transformers() -> list[str]:
    """Names of the transformers that ship."""
    return sorted(p.parent.name for p in TRANSFORMERS.glob("*/config.json"))


def load_transformer(name: str | Path = "power-cosine") -> Any:
    """A shipped transformer by name, or one from a folder, in float32.

    Raises:
        VitrineError: If there is no such model.
    """
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel.from_pretrained(transformer_folder(name), torch_dtype=torch.float32).eval()


def student_file(name: str = "student") -> Path:
    """The LoRA file of a shipped student (kohya names, contract in its header).

    Raises:
        VitrineError: If there is no such student.
    """
    path = STUDENT_FOLDER / "vitrine" / f"vitrine-portraits-emd-{name}.safetensors"
    if name not in STUDENTS or not path.is_file():
        raise refuse("student", name, sorted(STUDENTS), "vitrine emd train makes one")
    return path
