"""The LoRA files of a trained student, in ComfyUI's and diffusers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import refuse
from ..io.files import save_safetensors
from ..io.hub import Shared
from ..io.lora_writing import diffusers_names, kohya, of_peft
from .students import StudentPreset, read_student


@dataclass(frozen=True, repr=False)
class Student(Shared):
    """A trained one-step student.

    Attributes:
        preset: how it is sampled.
        tensors: a LoRA in names that diffusers reads, or a whole network.
    """

    FILE = "student.safetensors"
    TITLE = "One-step student"
    ABOUT = "One forward draws a picture of the base model (EM Distillation, arXiv:2405.16852)."
    FOLDER = "loras"

    preset: StudentPreset
    tensors: Mapping[str, torch.Tensor]

    def __repr__(self) -> str:
        return f"Student(base={self.preset.base!r}, timestep={self.preset.timestep:g}, {len(self.tensors)} tensors)"

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file atomically; the preset is in its header."""
        return save_safetensors(path, dict(self.tensors), self.preset.to_metadata())

    @classmethod
    def load(cls, path: str | Path) -> Student:
        """Reads such a file, or one of :func:`export`."""
        return cls(*read_student(path, any_names=True))


def from_file(
    tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], name: str
) -> dict[str, torch.Tensor]:
    """Reads a file of :func:`export` as adapters with the names and shapes of ``like``.

    kohya's alpha is multiplied into lora_B.
    """
    out: dict[str, torch.Tensor] = {}
    for key, weight in like.items():
        module, matrix = _split(key, name)
        stem = _stem(module)
        spelt = (f"{stem}.lora_{_DIRECTION[matrix]}.weight", *(f"{p}.{module}.lora_{matrix}.weight" for p in PARTS))
        value = next((tensors[k] for k in spelt if k in tensors), None)
        if value is None or value.shape != weight.shape:
            shape = "nothing" if value is None else tuple(value.shape)
            remedy = "set rank to the file's, and take a student of the same model"
            raise refuse(f"LoRA layer {module}", shape, tuple(weight.shape), remedy)
        rank = weight.shape[0 if matrix == "A" else 1]
        scale = float(tensors.get(f"{stem}.alpha", torch.tensor(float(rank)))) / rank
        out[key] = value.float() * (scale if matrix == "B" else 1.0)
    return out


PARTS = ("unet", "transformer")
"""Pipeline components, the prefixes of module names in diffusers' files."""
_DIRECTION = {"A": "down", "B": "up"}


def _stem(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")


def _split(key: str, name: str) -> tuple[str, str]:
    """The module and the matrix, A or B, of a PEFT key: ``<module>.lora_A.<adapter>.weight``."""
    module, tail = key.split(".lora_", 1)
    return module, tail.split(f".{name}.", 1)[0]


def export(
    folder: str | Path, weights: Mapping[str, torch.Tensor], name: str, preset: StudentPreset, part: str = "unet"
) -> tuple[Path, ...]:
    """Writes ``<name>_diffusers.safetensors``, and first ``<name>_kohya.safetensors`` for a UNet, in half precision.

    The preset is in the header. ComfyUI also reads a transformer's single file; no program reads kohya names with
    diffusers' modules.
    """
    lora, written = of_peft({key: value.half() for key, value in weights.items()}), []
    for dialect in ("kohya", "diffusers") if part == "unet" else ("diffusers",):
        tensors = kohya(lora) if dialect == "kohya" else diffusers_names(lora, f"{part}.")
        path = Path(folder) / f"{name}_{dialect}.safetensors"
        written.append(save_safetensors(path, tensors, preset.to_metadata() | {"vitrine.role": name}))
    return tuple(written)
