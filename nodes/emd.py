"""One-step generation and repair of its samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.diffusion.noise import seeded_noise
from ..engine.emd import (
    ONE_STEP,
    Base,
    CorrectConfig,
    EStepConfig,
    FirstSteps,
    Networks,
    StudentPreset,
    StudentSampling,
    check_network,
    check_student,
    correct,
    detect,
    few_steps,
    one_step,
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
from .comfy.lora import NO_STUDENT, preset_in, student_files, student_stamp, with_student
from .comfy.model import (
    backbone_of,
    blank_latents,
    differentiable,
    latent_of,
    loading_denoiser_of,
    own_latents,
    picture_numbers,
)  # fmt: skip
from .comfy.progress import progress
from .comfy.saved import stamp
from .emd_inputs import AUTO, MANUAL, SEVERAL, base_inputs, preset_inputs, stock_outputs
from .sockets import under_advanced

CATEGORY = "Vitrine/few-step students"
_SEED = {"default": 0, "min": 0, "max": 2**32, "control_after_generate": True}


def _preset(choice: str, student: str, timestep: float, noise: str) -> StudentPreset:
    if choice == AUTO:
        preset = preset_in(student)
    elif choice == MANUAL:
        preset = StudentPreset(timestep=timestep, noise=noise)
    else:
        preset = ONE_STEP[choice]
    # ComfyUI's own sampling class turns every prediction into x0; what is not the base's is given to it
    return preset if preset.prediction == "x0" else replace(preset, prediction="model")


def _sampling(choice: str, student: str) -> StudentSampling | None:
    """The student of several steps that is chosen, or that the file's name tells."""
    detected = detect(student) if choice == AUTO and student != NO_STUDENT else None
    if detected is not None and detected.name in SEVERAL:
        return detected.sampling
    return SEVERAL.get(choice)


class EMDOneStepGenerator(io.ComfyNode):
    """A picture in one network call."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Student, prompt and size in; LATENT and its z out."""
        return io.Schema(
            node_id="VitrineEMDOneStepGenerator",
            display_name="EMD One-Step Generator",
            category=CATEGORY,
            description="Runs a one-step student as it was trained: one network call a picture, no negative prompt, "
            "and its own noise convention (EMD, DMD2, SiD, SwiftBrush, Turbo, Hyper, LCM). Students of two to "
            "eight steps run at the levels they were distilled for, and the base can begin, for variety.",
            search_aliases=[
                "one step",
                "EM distillation",
                "DMD2",
                "turbo",
                "LCM",
                "distilled",
                "fast",
                "speed up",
                "SiD",
                "draw in one step",
                "lightning",
                "hyper",
                "schnell",
                "sd turbo",
                "4 steps",
                "few steps",
                "speed",
                "faster",
            ],
            inputs=under_advanced(
                ("timestep", "noise", "base_steps", "replaces"),
                [
                    io.Model.Input("model", tooltip="The student, or its base model when a student file is chosen."),
                    io.Conditioning.Input("positive", tooltip="One plain prompt."),
                    io.Latent.Input("latent", tooltip="Gives size and batch only; its content is not used."),
                    io.Int.Input(
                        "seed", **_SEED, tooltip="Seed of the first picture; each further one has the next seed."
                    ),
                    *preset_inputs(True),
                    *base_inputs(),
                ],
            ),
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The pictures' latents, for VAE Decode."),
                io.Latent.Output(display_name="z", tooltip="The generator's input, for EMD Repair Samples."),
                *stock_outputs(),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, student: str, **others: Any) -> str:
        """Runs again when the student's file has changed."""
        return student_stamp(student)

    @classmethod
    def validate_inputs(cls, student: str | None = None) -> bool | str:
        """What to put where, said on the node while the rest of the graph runs."""
        if student is None or student in student_files():
            return True
        return f"student: there is no {student}; put the LoRA into models/loras, press R in the page, and choose it"

    @classmethod
    def execute(
        cls, model: Any, positive: list, latent: dict, seed: int, student: str, contract: str, timestep: float,
        noise: str, base: Any = None, base_steps: int = 1, replaces: int = 1,
    ) -> io.NodeOutput:  # fmt: skip
        """``one_step`` or ``few_steps`` on seeded noise."""
        several = _sampling(contract, student)
        preset = StudentPreset() if several else _preset(contract, student, timestep, noise)
        if several is None:
            check_network(preset, backbone_of(model))
            if base is not None:
                taken = "a student of one step"
                raise refuse("base", f"connected to {taken}", "a student of several steps", "disconnect it")
        else:
            check_student(several, backbone_of(model))
            refuse_guidance_input(several)
        runner = with_prediction(with_student(model, student), preset.prediction)
        blank = blank_latents(runner, latent)
        seeds = [seed + i for i in picture_numbers(latent)]
        z = seeded_noise(seeds, tuple(blank.shape[1:])).to(blank.device)
        generator = loading_denoiser_of(runner)
        cond = condition_of(runner, positive, blank, None if several else preset.timestep, regional=True)
        if several is None:
            x0 = one_step(generator, z, cond, replace(preset, prediction="model"))
        else:
            first = FirstSteps(replaces, 0 if base_steps == 1 else base_steps)
            begins = None if base is None else Base(loading_denoiser_of(base), cond, None, first)
            x0 = few_steps(generator, z, cond, several, seeds, begins, progress(runner))
        x0 = checked_latents(x0)
        levels = several or StudentSampling("", (max(preset.timestep, 1.0),))
        sigmas, sampler = stock_sampling(runner, levels)
        numbers = {k: latent[k] for k in ("batch_index",) if k in latent}
        return io.NodeOutput(latent_of(runner, x0) | numbers, {"samples": z.cpu()} | numbers, sigmas, sampler)


class EMDMCMCCorrect(io.ComfyNode):
    """Repair one-step samples with the teacher."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Teacher, the student's two networks, z and prompt in; LATENT out."""
        return io.Schema(
            node_id="VitrineEMDMCMCCorrect",
            display_name="EMD Repair Samples",
            category=CATEGORY,
            description="Repairs one-step samples: short Langevin chains move them to where the teacher puts more "
                        "density than the student. Needs the student's own score network (a LoRA that ships with it).",
            search_aliases=["repair", "Langevin", "MCMC", "refine", "corrector", "EM distillation"],
            inputs=under_advanced(("step_size", "contract", "timestep", "noise", "guidance", "z_step_size"), [
                io.Model.Input("teacher", tooltip="The base model the student was distilled from."),
                io.Model.Input("score", tooltip="The student's score network: the base with the score LoRA at 1."),
                io.Model.Input("model", tooltip="The student, or its base when a student file is chosen."),
                io.Conditioning.Input("positive", tooltip="The prompt the samples were made with."),
                io.Latent.Input("z", tooltip="The noise that EMD One-Step Generator started from, its second output."),
                io.Int.Input(
                    "seed", **_SEED,
                    tooltip="Seed of the chain's noise for the first picture; each further one has the next seed.",
                ),
                io.Int.Input(
                    "steps", display_name="chain_steps", default=16, min=0, max=1000,
                    tooltip="Langevin steps; 0 leaves the sample as it is. Two network calls each.",
                ),
                io.Float.Input(
                    "chain_timestep", default=399.0, min=1.0, max=999.0, step=1.0,
                    tooltip="Noise level of the chain, as a network timestep; higher moves more.",
                ),
                io.Float.Input(
                    "step_size", default=0.16, min=0.001, max=1.0, step=0.01,
                    tooltip="Step size of the chain, 0.16 by default; 1 forgets the last point at each step.",
                ),
                *preset_inputs(False),
                io.Float.Input(
                    "guidance", default=0.0, min=0.0, max=30.0, step=0.5, optional=True,
                    tooltip="Guidance of the teacher; 0 takes that of the student's training, which its preset names.",
                ),
                io.Float.Input(
                    "z_step_size", default=0.0, min=0.0, max=1.0, step=0.001, optional=True,
                    tooltip="How far the chain also moves the noise the student started from, 0.01 for example; 0 "
                    "keeps it.",
                ),
                io.Conditioning.Input(
                    "empty", optional=True,
                    tooltip="The empty prompt, for guidance other than 1. Without it the teacher is not guided.",
                ),
            ]),
            outputs=[io.Latent.Output(display_name="LATENT", tooltip="The repaired pictures' latents.")],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, student: str, **others: Any) -> str:
        """Runs again when the student's file has changed."""
        return student_stamp(student)

    @classmethod
    def execute(
        cls, teacher: Any, score: Any, model: Any, positive: list, z: dict, seed: int, steps: int,
        chain_timestep: float, step_size: float, student: str, contract: str, timestep: float, noise: str,
        guidance: float = 0.0, z_step_size: float = 0.0, empty: list | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        """``correct``, outside inference mode where z moves."""
        config = CorrectConfig(steps, chain_timestep, step_size, z_step_size, guidance)
        preset = _preset(contract, student, timestep, noise)
        check_network(preset, backbone_of(model))
        runner = with_prediction(with_student(model, student), preset.prediction)
        preset = replace(preset, prediction="model")
        start = own_latents(runner, z).to(runner.load_device).float()
        cond = condition_of(runner, positive, start)
        null = None if empty is None else condition_of(runner, empty, start)
        networks = Networks(*(loading_denoiser_of(m) for m in (runner, teacher, score)))
        seeds = [seed + i for i in picture_numbers(z)]
        # a z that moves needs gradients of the generator
        with torch.inference_mode(not z_step_size), torch.no_grad(), differentiable() if z_step_size else nullcontext():
            if z_step_size:
                start, cond = start.clone(), cond.to(start.device, copy=True)
                null = None if null is None else null.to(start.device, copy=True)
            x0, _ = correct(networks, start, cond, preset, config, seeds, null, progress(runner))
        return io.NodeOutput(latent_of(runner, x0))


class EMDDistill(io.ComfyNode):
    """A small distillation run inside ComfyUI."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Base, prompts and settings in; the LoRA file and first pictures out."""
        return io.Schema(
            node_id="VitrineEMDDistill",
            display_name="EMD Train Student",
            category=CATEGORY,
            description="Distils a one-step student as a LoRA, with its score LoRA, from a diffusers folder or the "
            "portraits model. For small runs: the same name resumes. Large ones: `vitrine emd train`.",
            search_aliases=[
                "train", "distillation", "EM distillation", "one step", "Diff-Instruct", "LoRA training",
                "train turbo", "make a model fast", "distill my model",
            ],
            is_output_node=True,
            inputs=under_advanced(("batch", "rank", "K", "guidance", "timestep", "diff_instruct"), [
                io.Combo.Input(
                    "base", options=bases(), default="portraits",
                    tooltip="The teacher: portraits, flow portraits, or a diffusers folder of any family in "
                    "models/diffusers, but PixArt.",
                ),
                io.String.Input(
                    "prompts", multiline=True, default="",
                    tooltip="One a line; the student learns these. Empty for portraits: its own 2,000 captions.",
                ),
                io.String.Input("name", default="student", tooltip="Folder under output/vitrine_emd; it resumes."),
                io.Int.Input("steps", display_name="training_steps", default=200, min=1, max=1_000_000,
                             tooltip="Generator updates in all."),
                io.Int.Input("batch", default=8, min=1, max=256, tooltip="Samples in each update."),
                io.Int.Input("rank", default=16, min=1, max=256, tooltip="LoRA rank of generator and score network."),
                io.Int.Input("K", default=4, min=1, max=64, tooltip="Langevin steps; 4 to start with, 8 for release."),
                io.Float.Input("guidance", default=3.0, min=1.0, max=30.0, step=0.5, tooltip="Of the teacher only."),
                io.Float.Input("timestep", default=999.0, min=1.0, max=999.0, step=1.0,
                               tooltip="The one network timestep of the student."),
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
        cls, base: str, prompts: str, name: str, steps: int, batch: int, rank: int, K: int, guidance: float,
        timestep: float, diff_instruct: bool, seed: int,
    ) -> io.NodeOutput:  # fmt: skip
        """``Trainer.run`` outside inference mode."""
        chain = EStepConfig.diff_instruct() if diff_instruct else EStepConfig(K)
        every = max(1, min(100, steps))
        advanced = EMDAdvancedConfig(save_every=every, grid_every=every)
        config = EMDTrainConfig(
            steps, batch, timestep, rank, chain, guidance=guidance, seed=seed, advanced=advanced
        )  # fmt: skip
        pictures, file = distil(base, lines_of(prompts), name, config, progress())
        return io.NodeOutput(pictures, str(file), ui=ui.PreviewImage(pictures, cls=cls))


NODES: list[type[io.ComfyNode]] = [EMDOneStepGenerator, EMDMCMCCorrect, EMDDistill]
