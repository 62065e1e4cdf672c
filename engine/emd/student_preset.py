"""Sampling settings of a one-step student, from its file's header or a published preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import refuse
from ..families import family_of, published_as
from ..io.files import check_tensors, named, parse_table, read_safetensors
from ..io.folders import has_ending
from ..network.site import ModuleSite
from ..runtime.stored_weights import shape_of
from ..settings.config import Config
from ..tracing.addresses import sites_of

KEY = "vitrine.student"
VERSION = 1
CONVENTIONS = ("unit", "vp", "edm")


_LARGEST_SIDE, _MOST_BETAS = 1 << 16, 10_000


@dataclass(frozen=True)
class StudentPreset(Config):
    """Sampling settings of a one-step student.

    Attributes:
        base: name of the teacher it was distilled from.
        timestep: t*, the network's single timestep, 0 to 1000.
        prediction: ``"model"`` (the base model's), or eps, v, x0, flow.
        noise: scale of the network's input for z ~ N(0, I). ``unit``: z. ``vp``: add_noise(0, z, t*) = sigma_vp z.
            ``edm``: sigma z in the variance-exploding scale, divided by sqrt(1 + sigma^2) for a VP network.
        latent_scale: VAE scaling factor in training; 0 if unknown.
        guidance: at inference; always 1, since guidance is distilled in.
        trained_guidance: guidance of the teacher in training; 0 if unknown.
        shape: latent size (C, H, W) in training, or empty.
        steps, ge, gz: of the E-step in training; 0 if unknown.
        betas: the schedule's (first, last) beta, scaled-linear, or empty.
    """

    base: str = ""
    timestep: float = 999.0
    prediction: str = "model"
    noise: str = "unit"
    latent_scale: float = 0.0
    guidance: float = 1.0
    trained_guidance: float = 0.0
    shape: tuple[int, ...] = ()
    steps: int = 0
    ge: float = 0.0
    gz: float = 0.0
    betas: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.noise not in CONVENTIONS:
            raise refuse(
                "noise convention",
                self.noise,
                CONVENTIONS,
                "DMD2, LCM and Vitrine's students are unit, SiD-LSG is vp",
            )
        if self.prediction not in ("model", "eps", "v", "x0", "flow"):
            raise refuse("prediction", self.prediction, "model, eps, v, x0 or flow", "model takes the base's")
        if not 0 <= self.timestep <= 1000:
            raise refuse("timestep", self.timestep, "0 <= t* <= 1000", "t* is the network's timestep")
        if self.guidance not in (0.0, 1.0):
            accepted = "1 (no guidance)"
            raise refuse("guidance", self.guidance, accepted, "guidance is distilled into a one-step student: set 1")
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if len(self.shape) > 4 or not all(0 < side <= _LARGEST_SIDE for side in self.shape):
            raise refuse("shape", self.shape, f"(C, h, w) of a latent, sides up to {_LARGEST_SIDE}", "leave it out")
        numbers = {name: getattr(self, name) for name in ("latent_scale", "trained_guidance", "ge", "gz")}
        if not all(0 <= value <= 1e6 for value in numbers.values()) or not 0 <= self.steps < 1 << 53:
            raise refuse(
                "student preset", numbers | {"steps": self.steps}, "numbers of 0 or more", "export the student again"
            )
        if len(self.betas) > _MOST_BETAS or not all(0 <= beta <= 1 for beta in self.betas):
            raise refuse("betas", f"{len(self.betas)}", f"up to {_MOST_BETAS} from 0 to 1", "leave them out")

    def to_metadata(self) -> dict[str, str]:
        """The preset as a safetensors header entry."""
        return {KEY: json.dumps({"version": VERSION} | self.to_dict(), sort_keys=True)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, name: str = "file") -> StudentPreset:
        """Reads the header entry; ``name`` is the file name for errors."""
        if not metadata or KEY not in metadata:
            accepted = f"a safetensors header with {KEY!r}"
            raise refuse("student preset", f"none in {name}", accepted, "choose a preset or enter t* by hand")
        with named(name, "student preset", "a table of settings", "export the student again"):
            values = parse_table(metadata[KEY])
            version = values.pop("version", None)
            if version != VERSION:
                raise refuse("preset version", version, VERSION, "update Vitrine")
            return cls.from_dict(values)


PRESETS: dict[str, StudentPreset] = {
    "DMD2 SDXL 1-step (UNet)": StudentPreset("SDXL", 399.0),
    "DMD2 SD1.5": StudentPreset("SD1.5", 999.0),
    "SiD-LSG SD1.5 / SD2.1": StudentPreset("SD1.5 or SD2.1-base", 625.0, noise="vp"),
    "SwiftBrush SD2.1": StudentPreset("SD2.1-base", 999.0),
    "SDXL-Turbo / SD-Turbo": StudentPreset("SDXL or SD2.1", 999.0, noise="vp"),
    "Hyper-SDXL 1-step (UNet)": StudentPreset("SDXL", 800.0),
    "LCM / LCM-LoRA": StudentPreset("SD1.5 or SDXL", 999.0),
}
"""Published students without a header; values from their READMEs and inference code."""


def read_student(
    path: str | Path, preset: StudentPreset | None = None, any_names: bool = False,
    otherwise: StudentPreset | None = None,
) -> tuple[StudentPreset, dict[str, torch.Tensor]]:  # fmt: skip
    """Preset and tensors of a student file.

    Args:
        preset: used instead of the header's, for files without one.
        any_names: also accept LoRA names that diffusers reads and ComfyUI does not.
        otherwise: default if there is no header entry.
    """
    path = Path(path)
    if not has_ending(path, ".safetensors") or not path.is_file():
        raise refuse("student file", str(path.name), "an existing .safetensors file", "convert or download it first")
    with named(path, "student file", "a safetensors file", "it cannot be read: download or export it again"):
        tensors, metadata = read_safetensors(path)
        if not any_names:
            check_names(tensors, path.name)
        check_tensors(tensors)
        if preset is None and otherwise is not None and KEY not in (metadata or {}):
            preset = otherwise
        return preset or StudentPreset.from_metadata(metadata, path.name), tensors


def check_names(tensors: Mapping[str, torch.Tensor], name: str = "file") -> None:
    """Raises for LoRA names that ComfyUI ignores except for a log line: UNet names other than kohya's."""
    peft = [k for k in tensors if (".lora_A." in k or ".lora_B." in k) and not k.startswith("transformer.")]
    if peft:
        accepted = "kohya names, lora_unet_....lora_down.weight with .alpha"
        raise refuse("LoRA names", f"{peft[0]} in {name} (PEFT)", accepted, "use the *_kohya file of the export")


def check_network(preset: StudentPreset, backbone: nn.Module) -> None:
    """Raises if a network is known not to be the student's base.

    Unknown bases are accepted.
    """
    pairs = [published_as(base) for base in preset.base.split(" or ")]
    bases = [pair for pair in pairs if pair is not None]
    if len(bases) < len(pairs):
        return
    own = family_of(backbone)
    models = [model for family, model in bases if family is own]
    width = _text_width(backbone) if any(model.text for model in models) else 0
    rivals = [model.other(backbone) for model in models if model.text in (0, width)]
    if not all(rivals):
        return
    widths = sorted({model.text for _, model in bases if model.text})
    shown = type(backbone).__name__ + (f" with text states of width {width}" if width else "")
    accepted = preset.base
    if bases[0][0].name != preset.base:
        accepted = f"a {bases[0][0].name} of {preset.base}"
    if widths:
        accepted += f" (width {' or '.join(map(str, widths))})"
    remedy = "choose the preset of this model's student, or enter t* by hand"
    raise refuse("model", next(iter(rivals), shown), accepted, remedy)


def _text_width(backbone: nn.Module) -> int:
    """Width of the text states in cross-attention; 0 without cross-attention."""
    sites = (s for s in sites_of(backbone).values() if isinstance(s, ModuleSite) and s.address.endswith("-cross-v"))
    site = next(sites, None)
    shape = None if site is None else shape_of(backbone.get_submodule(site.path))
    return 0 if shape is None else shape[1]


def check_base(preset: StudentPreset, base: str) -> None:
    """Raises for a student of another base model."""
    if base and preset.base and base != preset.base:
        raise refuse("student", f"distilled from {preset.base}", f"a student of {base}", "load the matching base")
