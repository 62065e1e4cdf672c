"""Students of one to eight steps: how each is sampled, by its file's header, by name or by the name of its file.

Sources of published students: the authors' model cards and inference code, and the defaults of diffusers' schedulers
that the cards name. Timesteps are the network's: 0 to 999 of a noise-predicting network, 1000 sigma of a flow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import nn

from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..families import family_of, published_as
from ..io.files import check_tensors, named, parse_table, read_safetensors
from ..io.folders import has_ending
from ..network.site import ModuleSite
from ..runtime.stored_weights import shape_of
from ..settings.one_line import one_line
from ..settings.option import Option, Options
from ..tracing.addresses import sites_of

KEY = "vitrine.student"
VERSION = 1
CONVENTIONS = ("unit", "vp")
_LARGEST_SIDE, _MOST_BETAS = 1 << 16, 10_000


Count = Annotated[float, Option("0 if unknown.", ge=0, le=1e6, remedy="export the student again")]


@one_line
@dataclass(frozen=True)
class StudentPreset(Options):
    """Sampling settings of a one-step student. ``steps``, ``ge`` and ``gz`` are the E-step's in training.

    ``guidance`` is always 1, since guidance is distilled in; ``trained_guidance`` is the teacher's in training.
    """

    base: Annotated[str, Option("Name of the teacher it was distilled from.")] = ""
    timestep: Annotated[
        float,
        Option(
            "The one network timestep of the student (999 for most, 399 DMD2 SDXL, 625 SiD-LSG).",
            ge=0,
            le=1000,
            step=1,
            remedy="t* is the network's timestep",
        ),
    ] = 999.0
    prediction: Annotated[
        str,
        Option(
            "Of the network; model is the base model's.",
            choices=("model", "eps", "v", "x0", "flow"),
        ),
    ] = "model"
    noise: Annotated[
        str,
        Option(
            "The noise the network starts from. unit: full strength (DMD2, LCM, "
            "SwiftBrush). vp: as strong as in a picture noised to that timestep (SiD-LSG).",
            choices=CONVENTIONS,
            remedy="DMD2, LCM and Vitrine's students are unit, SiD-LSG is vp",
        ),
    ] = "unit"
    latent_scale: Count = 0.0
    guidance: float = 1.0
    trained_guidance: Count = 0.0
    shape: Annotated[
        tuple[int, ...],
        Option(
            "Latent size (C, H, W) in training, or empty.",
            gt=0,
            le=_LARGEST_SIDE,
            remedy="leave it out",
        ),
    ] = ()
    steps: Annotated[int, Option("0 if unknown.", ge=0, lt=1 << 53, remedy="export the student again")] = 0
    ge: Count = 0.0
    gz: Count = 0.0
    betas: Annotated[
        tuple[float, ...],
        Option(
            "The schedule's (first, last) beta, scaled-linear, or empty.",
            ge=0,
            le=1,
        ),
    ] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        super().__post_init__()

    def _check(self) -> None:
        """No guidance; tables of a possible length."""
        if self.guidance not in (0.0, 1.0):
            accepted = "1 (no guidance)"
            raise refuse("guidance", self.guidance, accepted, "guidance is distilled into a one-step student: set 1")
        if len(self.shape) > 4:
            raise refuse("shape", self.shape, f"(C, h, w) of a latent, sides up to {_LARGEST_SIDE}", "leave it out")
        if len(self.betas) > _MOST_BETAS:
            raise refuse("betas", f"{len(self.betas)}", f"up to {_MOST_BETAS} from 0 to 1", "leave them out")

    def to_metadata(self) -> dict[str, str]:
        """The preset as a safetensors header entry."""
        return {KEY: json.dumps({"version": VERSION} | self.to_dict(), sort_keys=True)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, name: str = "file") -> StudentPreset:
        """Reads the header entry; ``name`` is the file name for errors."""
        if not metadata or KEY not in metadata:
            accepted = f"a safetensors header with {KEY!r}"
            raise refuse("student preset", f"none in {name}", accepted, "choose its preset, or manual and its timestep")
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
    path: str | Path,
    preset: StudentPreset | None = None,
    any_names: bool = False,
    otherwise: StudentPreset | None = None,
) -> tuple[StudentPreset, dict[str, torch.Tensor]]:
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
    remedy = "choose the preset of this model's student, or manual and its timestep"
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


SAMPLERS = ("euler", "euler_ancestral", "lcm", "tcd")


@one_line
@dataclass(frozen=True)
class StudentSampling(Options):
    """How a student is sampled. The names of its ``base`` models have "or" between them."""

    base: str
    timesteps: Annotated[tuple[float, ...], Option("One per step, decreasing.", remedy="999 is pure noise")]
    sampler: Annotated[
        str,
        Option(
            "euler, euler_ancestral (with fresh noise at the same level), lcm (x0, then all "
            "noise is new), tcd (a part of the noise is new, by ``eta``).",
            choices=SAMPLERS,
            remedy="euler follows the ODE without fresh noise",
        ),
    ] = "euler"
    eta: Annotated[
        float,
        Option(
            "Of tcd: 0 follows the ODE, 1 is lcm.",
            ge=0,
            le=1,
            remedy="TCD's authors take 0.3",
        ),
    ] = 0.0
    trained_guidance: Annotated[float, Option("For a network with a guidance embedding; 0 if it has none.")] = 0.0
    prediction: Annotated[str, Option("Of the network, if it differs from the base's.")] = "model"
    files: Annotated[str, Option("A pattern that the names of its files match.")] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "timesteps", tuple(float(t) for t in self.timesteps))
        super().__post_init__()

    def _check(self) -> None:
        """Decreasing timesteps."""
        steps = self.timesteps
        if not steps or not all(0 < t <= 1000 for t in steps) or list(steps) != sorted(set(steps), reverse=True):
            raise refuse("timesteps", steps, "decreasing, above 0 and up to 1000", "999 is pure noise")

    @property
    def one_step(self) -> StudentPreset:
        """The preset of a student of one step."""
        if len(self.timesteps) > 1:
            steps = len(self.timesteps)
            raise refuse("student", f"one of {steps} steps", "a one-step student", "sample it with few_steps")
        noise = "vp" if self.sampler.startswith("euler") else "unit"  # as in the scheduler of its model card
        return StudentPreset(
            self.base, self.timesteps[0], self.prediction, noise, trained_guidance=self.trained_guidance
        )

    def sigmas(self, schedule: NoiseSchedule) -> torch.Tensor:
        """(steps + 1,) float32 sigmas of the timesteps, then 0, as ComfyUI's SIGMAS."""
        return torch.cat([schedule.sigma(torch.tensor(self.timesteps)), torch.zeros(1)]).float()

    def split(self, schedule: NoiseSchedule, t: float, following: float) -> tuple[float, float]:
        """(kept, fresh) of a step from t to ``following``: x = x0 + kept eps + fresh n, where x = x0 + sigma eps.

        kept^2 + fresh^2 = sigma^2 at ``following``: ``euler`` keeps all, ``lcm`` samples all noise anew.
        """
        sigma, after = float(_ratio(schedule, t)), float(_ratio(schedule, following))
        if self.sampler == "lcm":
            return 0.0, after
        if self.sampler == "euler_ancestral":  # Song et al. 2021 (DDIM), Eq. 16 with eta = 1
            up = min(after, after * math.sqrt(max(1 - (after / sigma) ** 2, 0.0)))
            return math.sqrt(after**2 - up**2), up
        if self.sampler == "tcd":  # Zheng et al. 2024 (TCD), Alg. 4: along the path to s = (1 - eta) t, then noise
            kept = float(_ratio(schedule, math.floor((1 - self.eta) * following)))
            return kept, math.sqrt(max(after**2 - kept**2, 0.0))
        return after, 0.0


def _ratio(schedule: NoiseSchedule, t: float) -> torch.Tensor:
    """Noise over signal at t: sigma of a noise-predicting network, s / (1 - s) of a flow."""
    signal, noise = schedule.scales(t)
    return noise / signal


def _trailing(steps: int) -> tuple[float, ...]:
    """diffusers' ``timestep_spacing="trailing"``."""
    return tuple(round(1000 - i * 1000 / steps) - 1.0 for i in range(steps))


def _consistency(steps: int) -> tuple[float, ...]:
    """As LCMScheduler and TCDScheduler: evenly spaced ones of the fifty timesteps 999, 979, ... 19."""
    return tuple(999.0 - 20 * (i * 50 // steps) for i in range(steps))


def _flow(steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """Even levels from 1, shifted: s' = shift s / (1 + (shift - 1) s) (Esser et al. 2024, Eq. 23)."""
    even = [1 - i / steps for i in range(steps)]
    return tuple(1000 * shift * s / (1 + (shift - 1) * s) for s in even)


def _table() -> dict[str, StudentSampling]:
    table = {
        "LCM-LoRA, 4 steps": StudentSampling("SD1.5 or SDXL", _consistency(4), "lcm", files=r"lcm.?lora|lora.?lcm"),
        "LCM (full), 4 steps": StudentSampling(
            "SD1.5 or SDXL", _consistency(4), "lcm", trained_guidance=8.5, files=r"lcm_?(dreamshaper|sdxl|full|unet)"
        ),
        "DMD2 SDXL, 1 step": StudentSampling("SDXL", (399.0,), "lcm", files=r"dmd2.*1.?step"),
        "DMD2 SDXL, 4 steps": StudentSampling("SDXL", (999.0, 749.0, 499.0, 249.0), "lcm", files=r"dmd2.*4.?step"),
        "TCD-LoRA, 4 steps": StudentSampling(
            "SD1.5 or SD2.1-base or SDXL", _consistency(4), "tcd", 0.3, files=r"(^|[^a-z])tcd"
        ),
        "Hyper-SD, 1 step (LoRA)": StudentSampling(
            "SD1.5 or SDXL", (999.0,), "tcd", 1.0, files=r"hyper.?sd(15|xl).?1.?steps?.?lora"
        ),
        "Hyper-SDXL, 1 step (UNet)": StudentSampling("SDXL", (800.0,), "lcm", files=r"hyper.?sdxl.?1.?step.?unet"),
        "FLUX.1 schnell, 4 steps": StudentSampling("Flux.1 schnell", _flow(4), files=r"flux.*schnell"),
        "Z-Image-Turbo, 8 steps": StudentSampling("Z-Image", _flow(8, 3.0), files=r"z.?image.?turbo"),
    }
    for steps in (1, 2, 4):
        table[f"SD-Turbo, {_count(steps)}"] = StudentSampling(
            "SD2.1", _trailing(steps), "euler_ancestral", files=r"sd.?turbo" if steps == 1 else ""
        )
        table[f"SDXL-Turbo, {_count(steps)}"] = StudentSampling(
            "SDXL", _trailing(steps), "euler_ancestral", files=r"(sd.?xl|xl).?turbo" if steps == 1 else ""
        )
    for steps in (1, 2, 4, 8):
        x0 = "x0" if steps == 1 else "model"  # the one-step model predicts x0
        pattern = rf"lightning.?{steps}.?step"
        table[f"SDXL-Lightning, {_count(steps)}"] = StudentSampling(
            "SDXL", _trailing(steps), prediction=x0, files=rf"^(?!.*qwen).*(sd)?xl.*{pattern}"
        )
    for steps in (2, 4, 8):
        table[f"Hyper-SD, {_count(steps)}"] = StudentSampling(
            "SD1.5 or SDXL", _trailing(steps), files=rf"hyper.?sd(15|xl).?{steps}.?steps?.?lora"
        )
        table[f"PCM small guidance, {_count(steps)}"] = StudentSampling(
            "SD1.5 or SDXL", _trailing(steps), files=rf"pcm.*smallcfg.?{steps}.?step"
        )
    for steps in (4, 8):
        table[f"Qwen-Image-Lightning, {_count(steps)}"] = StudentSampling(
            "Qwen-Image", _flow(steps, 3.0), files=rf"qwen.?image.?lightning.?{steps}.?steps"
        )
    return dict(sorted(table.items()))


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


STUDENTS: dict[str, StudentSampling] = _table()
"""Published students by name; one-step ones also run in the one-step generator."""
_SINGLE = {name: student.one_step for name, student in STUDENTS.items() if len(student.timesteps) == 1}
ONE_STEP: dict[str, StudentPreset] = PRESETS | {k: c for k, c in _SINGLE.items() if c not in PRESETS.values()}
"""Presets of one-step students: :data:`PRESETS`, and those of :data:`STUDENTS` that differ from them."""


class Detected(NamedTuple):
    """A student detected by its file name."""

    name: str
    sampling: StudentSampling


def detect(file: str | Path) -> Detected | None:
    """The student that a file name matches; None if none matches, or more than one.

    These files have no header that identifies them.
    """
    stem = Path(file).stem.lower()
    fitting = [Detected(k, s) for k, s in STUDENTS.items() if s.files and re.search(s.files, stem)]
    return fitting[0] if len(fitting) == 1 else None


def one_step_of(file: str | Path) -> StudentPreset | None:
    """The preset of a one-step student by its file name, or None."""
    detected = detect(file)
    return detected.sampling.one_step if detected is not None and len(detected.sampling.timesteps) == 1 else None


def known(preset: str) -> StudentSampling:
    """A student of :data:`STUDENTS` by name."""
    if preset not in STUDENTS:
        raise refuse("student", preset, sorted(STUDENTS), "write its timesteps out in a StudentSampling")
    return STUDENTS[preset]


def check_student(sampling: StudentSampling, backbone: nn.Module) -> None:
    """Raises if a network is known not to be the student's base."""
    check_network(replace(StudentPreset(), base=sampling.base), backbone)
