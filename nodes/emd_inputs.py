"""Inputs and outputs that the EMD nodes share: which student, who begins, and what core's sampler needs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..engine.emd import ONE_STEP, STUDENTS
from .comfy.lora import student_files, usual_student

AUTO, MANUAL = "auto", "manual"
SEVERAL = {name: s for name, s in STUDENTS.items() if len(s.timesteps) > 1}
"""Published students of several steps."""


def preset_inputs(several: bool) -> list[Any]:
    """Which student, and how it is run; the same on both nodes, but for students of several steps."""
    return [
        io.Combo.Input(
            "student", options=student_files(), default=usual_student(),
            tooltip="A student LoRA to apply at strength 1, or none if MODEL is the student already.",
        ),
        io.Combo.Input(
            "contract", display_name="preset",
            options=[AUTO, *ONE_STEP, *(SEVERAL if several else ()), MANUAL], default=AUTO,
            tooltip="auto reads the student file's header, or knows it by its name; a preset knows a published "
            "student; manual takes the two values below.",
        ),
        io.Float.Input(
            "timestep", default=999.0, min=0.0, max=1000.0, step=1.0,
            tooltip="Manual: the one network timestep of the student (999 for most, 399 DMD2 SDXL, 625 SiD-LSG).",
        ),
        io.Combo.Input(
            "noise", display_name="start_noise", options=["unit", "vp", "edm"], default="unit",
            tooltip="Manual: the noise the network starts from. unit: full strength (DMD2, LCM, SwiftBrush). vp: as "
            "strong as in a picture noised to that timestep (SiD-LSG). edm: another name for vp.",
        ),
    ]  # fmt: skip


def base_inputs() -> list[Any]:
    """The model that takes a student's first steps, and how many."""
    return [
        io.Model.Input(
            "base",
            optional=True,
            tooltip="The model a student of several steps was distilled from: it takes the first step, "
            "which gives the pictures of one prompt their variety back.",
        ),
        io.Int.Input(
            "base_steps",
            default=1,
            min=1,
            max=50,
            optional=True,
            tooltip="Steps of the base for the student's first one. 1 costs no more calls than without it.",
        ),
        io.Int.Input(
            "replaces",
            default=1,
            min=1,
            max=7,
            optional=True,
            tooltip="How many of the student's steps, from the first, the base takes: more give more "
            "variety, and more of the base's blur at few steps.",
        ),
    ]


def stock_outputs() -> list[Any]:
    """What core's own sampler needs to run the same student."""
    return [
        io.Sigmas.Output(
            display_name="SIGMAS",
            tooltip="The student's own noise levels, for SamplerCustom with cfg 1: the same student in core's "
            "sampler, with previews, inpainting or other packs' nodes.",
        ),
        io.Sampler.Output(
            display_name="SAMPLER", tooltip="How its steps are taken, for SamplerCustom together with SIGMAS."
        ),
    ]  # fmt: skip
