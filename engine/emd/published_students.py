"""Published students of one to eight steps: their timesteps, samplers and file names.

Sources: the authors' model cards and inference code, and the defaults of diffusers' schedulers that
the cards name. Timesteps are the network's: 0 to 999 of a noise-predicting network, 1000 sigma of a flow.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from ..settings.config import Config
from .student_preset import PRESETS, StudentPreset, check_network

SAMPLERS = ("euler", "euler_ancestral", "lcm", "tcd")


@dataclass(frozen=True)
class StudentSampling(Config):
    """How a student is sampled.

    Attributes:
        base: names of the models it was distilled from, with "or" between them.
        timesteps: one per step, decreasing.
        sampler: ``euler``, ``euler_ancestral`` (with fresh noise at the same level), ``lcm`` (x0, then all noise
            is new), ``tcd`` (a part of the noise is new, by ``eta``).
        eta: of ``tcd``: 0 follows the ODE, 1 is ``lcm``.
        guidance: of the sampler: 1, since guidance is distilled in.
        trained_guidance: value for a network with a guidance embedding; 0 if it has none.
        prediction: of the network, if it differs from the base's.
        files: a pattern that the names of its files match.
    """

    base: str
    timesteps: tuple[float, ...]
    sampler: str = "euler"
    eta: float = 0.0
    guidance: float = 1.0
    trained_guidance: float = 0.0
    prediction: str = "model"
    files: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "timesteps", tuple(float(t) for t in self.timesteps))
        steps = self.timesteps
        if not steps or not all(0 < t <= 1000 for t in steps) or list(steps) != sorted(set(steps), reverse=True):
            raise refuse("timesteps", steps, "decreasing, above 0 and up to 1000", "999 is pure noise")
        if self.sampler not in SAMPLERS:
            raise refuse("sampler", self.sampler, SAMPLERS, "euler follows the ODE without fresh noise")
        if not 0 <= self.eta <= 1:
            raise refuse("eta", self.eta, "0 to 1", "TCD's authors take 0.3")

    @property
    def one_step(self) -> StudentPreset:
        """The preset of a student of one step."""
        if len(self.timesteps) > 1:
            steps = len(self.timesteps)
            raise refuse("student", f"one of {steps} steps", "a one-step student", "sample it with few_steps")
        noise = "vp" if self.sampler.startswith("euler") else "unit"  # as in the scheduler of its model card
        return StudentPreset(
            self.base, self.timesteps[0], self.prediction, noise, trained_guidance=self.trained_guidance
        )  # fmt: skip

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
"""Presets of one-step students: those with earlier names, and those of :data:`STUDENTS`."""


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
