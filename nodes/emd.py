"""Students of few steps: sampling, the variety of their pictures, and small training runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.diffusion.noise import seeded_noise
from ..engine.emd import (
    ONE_STEP,
    STUDENTS,
    Base,
    EStepConfig,
    FirstSteps,
    StudentPreset,
    StudentSampling,
    Variety,
    check_network,
    check_student,
    detect,
    few_steps,
    measure_variety,
    one_step,
    small_pixels,
)
from ..engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from ..engine.errors import refuse
from ..engine.io.tables import lines_of
from .comfy.conditioning import condition_of
from .comfy.emd import (
    base_folder,
    bases,
    checked_latents,
    distil,
    refuse_guidance_input,
    stock_sampling,
    with_prediction,
)
from .comfy.lora import NO_STUDENT, preset_in, student_files, student_stamp, usual_student, with_student
from .comfy.model import backbone_of, blank_latents, denoiser_of, latent_of, picture_numbers
from .comfy.pictures import as_pictures
from .comfy.progress import progress, text_on
from .comfy.saved import in_the_list, stamp
from .config_inputs import input_of, inputs_of, settings_from, with_values
from .sockets import under_advanced

CATEGORY = "Vitrine/few-step students"
_SEED = {"default": 0, "min": 0, "max": 2**32, "control_after_generate": True}
_AUTO, _MANUAL = "auto", "manual"
_SEVERAL = {name: s for name, s in STUDENTS.items() if len(s.timesteps) > 1}
"""Published students of several steps."""


def _contract(choice: str, student: str, manual: dict[str, Any]) -> StudentPreset:
    """``manual``: the values that stand below that choice."""
    if choice == _AUTO:
        preset = preset_in(student)
    elif choice == _MANUAL:
        preset = settings_from(StudentPreset, manual)
    else:
        preset = ONE_STEP[choice]
    # ComfyUI's own sampling class turns every prediction into x0; what is not the base's is given to it
    return preset if preset.prediction == "x0" else replace(preset, prediction="model")


def _sampling(choice: str, student: str) -> StudentSampling | None:
    """The student of several steps that is chosen, or that the file's name tells."""
    detected = detect(student) if choice == _AUTO and student != NO_STUDENT else None
    if detected is not None and detected.name in _SEVERAL:
        return detected.sampling
    return _SEVERAL.get(choice)


class EMDOneStepGenerator(io.ComfyNode):
    """A picture in one network call."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Student, prompt and size in; LATENT out, and what core's own sampler needs to run the same student."""
        return io.Schema(
            node_id="VitrineEMDOneStepGenerator",
            display_name="One-Step Sampler (EMD)",
            category=CATEGORY,
            description="Runs a one-step student as it was trained: one network call a picture, no negative prompt, "
            "and its own noise convention (EMD, DMD2, SiD, SwiftBrush, Turbo, Hyper, LCM). Students of two to "
            "eight steps run at the levels they were distilled for, and the base can begin, for variety.",
            inputs=under_advanced(("base_steps", "replaces"), [
                io.Model.Input("model", tooltip="The student, or its base model when a student file is chosen."),
                io.Conditioning.Input("positive", tooltip="One plain prompt."),
                io.Latent.Input("latent", tooltip="Gives size and batch only; its content is not used."),
                io.Int.Input(
                    "seed", **_SEED, tooltip="Seed of the first picture; each further one has the next seed."
                ),
                io.Combo.Input(
                    "student", options=student_files(), default=usual_student(),
                    tooltip="A student LoRA to apply at strength 1, or none if MODEL is the student already.",
                ),
                with_values(
                    "preset", [_AUTO, *ONE_STEP, *_SEVERAL, _MANUAL],
                    {_MANUAL: inputs_of(StudentPreset, "timestep", "noise")},
                    tooltip="auto reads the student file's header, or knows it by its name; a preset knows a published "
                    "student; manual takes the two values below.",
                ),
                io.Model.Input(
                    "base", optional=True,
                    tooltip="The model a student of several steps was distilled from: it takes the first step, "
                    "which gives the pictures of one prompt their variety back.",
                ),
                io.Int.Input(
                    "base_steps", default=1, min=1, max=50, optional=True,
                    tooltip="Steps of the base for the student's first one. 1 costs no more calls than without it.",
                ),
                *inputs_of(FirstSteps, "replaces", optional=True),
            ]),
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The pictures' latents, for VAE Decode."),
                io.Sigmas.Output(
                    display_name="SIGMAS",
                    tooltip="The student's own noise levels, for SamplerCustom with cfg 1: the same student in core's "
                    "sampler, with previews, inpainting or other packs' nodes.",
                ),
                io.Sampler.Output(
                    display_name="SAMPLER", tooltip="How its steps are taken, for SamplerCustom together with SIGMAS."
                ),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, student: str, **others: Any) -> str:
        """Runs again when the student's file has changed."""
        return student_stamp(student)

    @classmethod
    def validate_inputs(cls, student: str | None = None, preset: Any = None) -> bool | str:
        """What to put where, said on the node while the rest of the graph runs; ComfyUI hands on choices always."""
        return student is None or in_the_list("student", student, student_files())

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        latent: dict,
        seed: int,
        student: str,
        preset: dict[str, Any],
        base: Any = None,
        base_steps: int = 1,
        replaces: int = 1,
    ) -> io.NodeOutput:
        """``one_step`` or ``few_steps`` on seeded noise."""
        choice = preset["preset"]
        several = _sampling(choice, student)
        contract = StudentPreset() if several else _contract(choice, student, preset)
        if several is None:
            check_network(contract, backbone_of(model))
            if base is not None:
                taken = "a student of one step"
                raise refuse("base", f"connected to {taken}", "a student of several steps", "disconnect it")
        else:
            check_student(several, backbone_of(model))
            refuse_guidance_input(several)
        runner = with_prediction(with_student(model, student), contract.prediction)
        blank = blank_latents(runner, latent)
        seeds = [seed + i for i in picture_numbers(latent)]
        z = seeded_noise(seeds, tuple(blank.shape[1:])).to(blank.device)
        generator = denoiser_of(runner)
        cond = condition_of(runner, positive, blank, None if several else contract.timestep, regional=True)
        if several is None:
            x0 = one_step(generator, z, cond, replace(contract, prediction="model"))
        else:
            first = FirstSteps(replaces, 0 if base_steps == 1 else base_steps)
            begins = None if base is None else Base(denoiser_of(base), cond, first)
            x0 = few_steps(generator, z, cond, several, seeds, begins, progress(runner))
        x0 = checked_latents(x0)
        levels = several or StudentSampling("", (max(contract.timestep, 1.0),))
        sigmas, sampler = stock_sampling(runner, levels)
        numbers = {k: latent[k] for k in ("batch_index",) if k in latent}
        return io.NodeOutput(latent_of(runner, x0) | numbers, sigmas, sampler)


class EMDDistill(io.ComfyNode):
    """A small distillation run inside ComfyUI."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Base, prompts and settings in; the LoRA file and first pictures out."""
        return io.Schema(
            node_id="VitrineEMDDistill",
            display_name="Train One-Step Student (EMD)",
            category=CATEGORY,
            description="Distils a one-step student as a LoRA, from a diffusers folder or the portraits model. For "
            "small runs: the same name resumes. Large ones: `vitrine emd train`.",
            is_output_node=True,
            inputs=under_advanced(("batch", "rank", "K", "guidance", "timestep", "diff_instruct"), [
                io.Combo.Input(
                    "base", options=bases(), default=bases()[0],
                    tooltip="The teacher: portraits, flow portraits, or a diffusers folder of any family in "
                    "models/diffusers, but PixArt.",
                ),
                io.String.Input(
                    "prompts", multiline=True, default="",
                    tooltip="One a line; the student learns these. Empty for portraits: its own 2,000 captions.",
                ),
                io.String.Input("name", default="student", tooltip="Folder under output/vitrine_emd; it resumes."),
                input_of(EMDTrainConfig, "steps", default=200),
                input_of(EMDTrainConfig, "batch", default=8),
                *inputs_of(EMDTrainConfig, "rank"),
                input_of(EStepConfig, "steps", "K"),
                input_of(EMDTrainConfig, "guidance", default=3.0),
                input_of(EMDTrainConfig, "timestep", default=999.0),
                io.Boolean.Input(
                    "diff_instruct", default=False,
                    tooltip="The baseline instead: one step of noise, and the student's starting noise stays as it is.",
                ),
                io.Int.Input("seed", **_SEED, tooltip="Of the whole run."),
            ]),
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="Four prompts in one step, after training."),
                io.String.Output(display_name="file", tooltip="The student LoRA, in models/loras/vitrine."),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, base: str, **others: Any) -> str:
        """Runs again when the teacher's folder has changed."""
        return stamp(base_folder(base))

    @classmethod
    def execute(
        cls,
        base: str,
        prompts: str,
        name: str,
        K: int,
        diff_instruct: bool,
        **options: Any,
    ) -> io.NodeOutput:
        """``Trainer.run`` outside inference mode."""
        chain = EStepConfig.diff_instruct() if diff_instruct else EStepConfig(K)
        advanced = EMDAdvancedConfig(save_every=max(1, min(100, options["steps"])))
        config = settings_from(EMDTrainConfig, options, chain=chain, advanced=advanced)
        pictures, file = distil(base, lines_of(prompts), name, config, progress())
        return io.NodeOutput(pictures, str(file), ui=ui.PreviewImage(pictures, cls=cls))


class EMDVariety(io.ComfyNode):
    """Distance between seeds, Vendi score, and recall of a reference."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Pictures of one prompt in; three numbers and a report out."""
        return io.Schema(
            node_id="VitrineEMDVariety",
            display_name="Measure Variety (EMD)",
            category=CATEGORY,
            description="Measures how different the pictures of one prompt are: mean distance between seeds, how many "
            "different pictures they amount to, and how much of a reference they reach. Fast students "
            "often make one picture for every seed.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Image.Input("images", tooltip="Pictures of one prompt, two or more, each with its own seed."),
                io.Image.Input(
                    "reference",
                    optional=True,
                    tooltip="What the same prompt should give, three pictures or more: the base model's, say.",
                ),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="The network whose features are compared. Without one it is colours at 16 x 16, which see "
                    "layout but not what is shown.",
                ),
            ],
            outputs=[
                io.Float.Output(display_name="distance", tooltip="Mean of 1 - cosine over pairs; 0: all the same."),
                io.Float.Output(display_name="vendi", tooltip="Vendi score: 1 to the number of pictures."),
                io.Float.Output(display_name="recall", tooltip="Fraction of the reference reached; -1 without one."),
                io.String.Output(display_name="report", tooltip="The same in words, with precision."),
            ],
        )

    @classmethod
    def execute(
        cls, images: torch.Tensor, reference: torch.Tensor | None = None, clip_vision: Any = None
    ) -> io.NodeOutput:
        """``measure_variety`` on features of the pictures."""
        theirs = None if reference is None else _features(as_pictures(reference, "reference"), clip_vision)
        images = as_pictures(images, "images")
        variety = measure_variety(_features(images, clip_vision), theirs)
        text = _report(variety, len(images), "16 x 16 colours" if clip_vision is None else "CLIP vision")
        recall = -1.0 if variety.recall is None else variety.recall
        return io.NodeOutput(variety.distance, variety.vendi, recall, text, ui=text_on(text))


def _features(images: torch.Tensor, clip_vision: Any) -> torch.Tensor:
    """(N, D) of (N, H, W, 3) pictures in [0, 1]."""
    if clip_vision is None:
        return small_pixels(images.movedim(-1, 1))
    return clip_vision.encode_image(images)["image_embeds"].float()


def _report(variety: Variety, count: int, features: str) -> str:
    lines = [
        f"{count} pictures, features: {features}",
        f"mean distance between seeds: {variety.distance:.4f}",
        f"Vendi score: {variety.vendi:.2f} of {count}",
    ]
    if variety.recall is not None and variety.precision is not None:
        lines.append(f"recall of the reference {variety.recall:.2f}, precision {variety.precision:.2f}")
    return "\n".join(lines)


NODES: list[type[io.ComfyNode]] = [EMDOneStepGenerator, EMDDistill, EMDVariety]
