"""Students of one step and of several as diffusers pipelines: loading and sampling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import seeded_noise, seeds_of
from ..diffusion.schedule import convention_of
from ..emd import (
    ONE_STEP,
    Base,
    FirstSteps,
    StudentPreset,
    StudentSampling,
    check_base,
    check_network,
    check_student,
    few_steps,
    known,
    one_step,
    one_step_of,
    read_student,
)
from ..emd.export import Student
from ..errors import expect, refuse
from ..families import family_of
from ..io.hub import local_file
from ..runtime.finite import require_finite
from ..settings.sizes import check_sides
from .adapter import Adapter
from .conventions import Generators, noise_sources, refuse_arguments
from .joined import TaskPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


MEANINGLESS = {
    "negative_prompt": "guidance is distilled into a one-step student",
    "negative_prompt_embeds": "guidance is distilled into a one-step student",
    "guidance_rescale": "guidance is distilled into a one-step student",
    "num_inference_steps": "there is one step",
    "timesteps": "there is one step, at the preset's timestep",
    "sigmas": "there is one step, at the preset's timestep",
    "eta": "there is one step",
    "callback_on_step_end": "there is one step",
    "cross_attention_kwargs": "set the strength of an adapter with set_adapters()",
    "max_sequence_length": "prompts are read to the text encoder's end",
}
"""What the stock pipelines take and a student does not, and what to do instead."""


class EMDOneStepPipeline(TaskPipeline):
    """A pipeline of any known family whose network is a one-step student (EM Distillation, Xie et al., NeurIPS 2024).

    Of a flow, x0 = z - v(z, t*) at t* = 1000. Encoded prompts are taken with what the other pipeline's call takes with
    them: ``pooled_prompt_embeds``, ``prompt_embeds_mask`` or ``prompt_attention_mask``.

    Example:
        >>> pipe = EMDOneStepPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> preset = pipe.load_student("student_kohya.safetensors")
        >>> images = pipe("a prompt", seeds=[0], preset=preset).images
    """

    _samples_as_stock = False

    def load_student(
        self,
        path: str | Path,
        base: str = "",
        adapter_name: str = "generator",
        *,
        preset: str | StudentPreset | None = None,
    ) -> StudentPreset:
        """Load a student, a LoRA in any names that diffusers reads or a whole network, and return its preset.

        Args:
            path: its file, or a folder or hub id of :meth:`~vitrine.engine.emd.export.Student.push_to_hub`.
            base: name of this model; a student of another one is refused.
            adapter_name: of a LoRA; one of that name that was loaded before gives way.
            preset: for files without one whose name does not tell: a published student's name in
                :data:`vitrine.engine.emd.ONE_STEP`, or a preset.
        """
        if isinstance(preset, str):
            if preset not in ONE_STEP:
                raise refuse("preset", preset, sorted(ONE_STEP), "or pass a StudentPreset")
            preset = ONE_STEP[preset]
        path = local_file(path, Student.FILE)
        read, tensors = read_student(path, preset, any_names=True, otherwise=one_step_of(path))
        check_base(read, base)
        check_network(read, self._network)
        if any(".lora" in key or key.startswith("lora_") for key in tensors):
            if not hasattr(self, "load_lora_weights"):
                shown, accepted = f"a LoRA for {type(self).__name__}", "a pipeline that loads LoRAs"
                raise refuse("student", shown, accepted, "load a student that is a whole network")
            if adapter_name in getattr(self._network, "peft_config", {}):
                self._network.delete_adapters(adapter_name)
            self.load_lora_weights(tensors, adapter_name=adapter_name)
        else:
            self._load_whole(tensors, Path(path).name)
        return read

    def _load_whole(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        net = copy.deepcopy(self._network)  # this one is shared with the pipeline that ``from_pipe`` took it from
        shapes = {key: value.shape for key, value in net.state_dict().items()}
        keys = shapes.keys() | tensors.keys()
        differing = [key for key in keys if key not in tensors or tensors[key].shape != shapes.get(key)]
        if differing:
            shown, accepted = f"{len(differing)} tensors of {name} differ", "the tensors of this pipeline's network"
            raise refuse("student network", shown, accepted, "load the matching base")
        net.load_state_dict(tensors)
        self.register_modules(**{self._adapter.family.component: net})

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        prompt: str | list[str] | None = None,
        seeds: int | list[int] | None = None,
        preset: StudentPreset | None = None,
        *,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "pil",
        return_dict: bool = True,
        **unknown: Any,
    ) -> StableDiffusionPipelineOutput:
        """One network call for all pictures, then the VAE.

        Args:
            prompt: one for all seeds, or one for each (for each ``num_images_per_prompt``).
            seeds: one for each picture; default 0, 1, ... for the prompts.
            preset: the student's t* and noise convention; by default unit, and t* where all is noise: 999, of a flow
                1000.
            generator: instead of seeds: one generator for all pictures, or one for each.
            latents: (B, C, H, W) z ~ N(0, I) instead of seeds.
            prompt_embeds: (B, N, C) encoded prompts instead of ``prompt``.
            pooled_prompt_embeds: (B, D) with them, for SDXL.
            height, width: in pixels; by default the size the student was made for.
            guidance_scale: 0 or 1; guidance is distilled in.
            output_type: ``"pil"``, ``"np"``, ``"pt"`` or ``"latent"``.
            return_dict: False returns the tuple (images, None).
        """
        adapter = self._adapter
        masks = {name: unknown.pop(name) for name in adapter.masks if name in unknown}
        refuse_arguments([EMDOneStepPipeline.__call__], unknown, MEANINGLESS, adapter.masks)
        if guidance_scale not in (0.0, 1.0):
            raise refuse("guidance_scale", guidance_scale, "0 or 1", "guidance is distilled into a one-step student")
        preset = StudentPreset(timestep=float(self._denoiser().schedule.last)) if preset is None else preset
        expect(preset, StudentPreset, "preset", "load_student returns it; ONE_STEP of vitrine.engine.emd has some")
        seeds = None if seeds is None else seeds_of(seeds)
        check_network(preset, self._network)
        if (prompt is None) == (prompt_embeds is None):
            raise refuse("prompt", "both or none", "a prompt, or prompt_embeds=", "give one of them")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        texts = len(prompts or []) if prompt_embeds is None else len(prompt_embeds)
        pictures = _pictures(texts, num_images_per_prompt, [seeds, generator, latents])
        sources = noise_sources(seeds, generator, latents, pictures)
        shape = (pictures, *latent_shape(adapter, height, width, preset))
        with self._in_use():
            z = latents if latents is not None else randn_tensor(shape, generator=sources, dtype=torch.float32)
            z = z.to(adapter.device)
            size = (shape[-2] * adapter.factor, shape[-1] * adapter.factor)
            embeds = {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled_prompt_embeds, **masks}
            cond = adapter.condition(prompts, size, **embeds)
            cond = cond.take(torch.arange(pictures) // (pictures // texts))
            images = decoded(self, one_step(self._denoiser(), z, cond, preset), output_type)
        output: Any = StableDiffusionPipelineOutput(images, None)
        return output if return_dict else output.to_tuple()

    @torch.no_grad()
    def few_steps(
        self,
        prompt: str | list[str],
        seeds: list[int],
        student: str | StudentSampling,
        *,
        base: Denoiser | None = None,
        first: FirstSteps | None = None,
        output_type: str = "pil",
    ) -> StableDiffusionPipelineOutput:
        """Pictures of a student of several steps, whose weights are loaded; the base may begin, which varies them.

        Args:
            prompt: one for all seeds, or one for each.
            student: a name in :data:`vitrine.engine.emd.STUDENTS`, or the settings themselves.
            base: the model it was distilled from, to take the first step; None leaves all to the student.
            first: how many steps.
        """
        sampling = known(student) if isinstance(student, str) else student
        check_student(sampling, self._network)
        prompts = [prompt] * len(seeds) if isinstance(prompt, str) else prompt
        noise_sources(seeds, None, None, len(prompts))
        adapter = self._adapter
        shape = latent_shape(adapter)
        size = (shape[1] * adapter.factor, shape[2] * adapter.factor)
        with self._in_use():
            z = seeded_noise(seeds, shape).to(adapter.device)
            cond = adapter.condition(prompts, size)
            begin = None if base is None else Base(base, cond, first or FirstSteps())
            with self.progress_bar(total=len(sampling.timesteps)) as bar:
                x0 = few_steps(self._denoiser(), z, cond, sampling, seeds, begin, lambda *_: bar.update())
            images = decoded(self, x0, output_type)
        return StableDiffusionPipelineOutput(images, None)


def decoded(pipe: Any, x0: torch.Tensor, output_type: str) -> Any:
    """Pictures of a pipeline's latents, or with ``"latent"`` the latents as they are."""
    require_finite(x0, "latents")
    if output_type == "latent":
        return x0
    processor = pipe.image_processor if hasattr(pipe, "image_processor") else pipe.video_processor
    return processor.postprocess(Adapter(pipe).decode(x0), output_type=output_type)


def latent_shape(
    adapter: Adapter, height: int | None = None, width: int | None = None, preset: StudentPreset | None = None
) -> tuple[int, ...]:
    """(C, h, w) of a picture's latents, by default of the size that a student was made for, or the usual one."""
    check_sides("height, width", height, width)
    made_for = () if preset is None else tuple(side * adapter.factor for side in preset.shape[1:])
    asked = (height, width) if height and width else made_for or adapter.usual_size()
    asked = (height or asked[0], width or asked[1])
    if made_for and asked != made_for:
        raise refuse("height, width", asked, f"{made_for}, the student's", "leave them out")
    if any(side % adapter.side_step for side in asked):
        raise refuse("height, width", asked, f"multiples of {adapter.side_step}", "round them")
    return adapter.channels, asked[0] // adapter.factor, asked[1] // adapter.factor


def _pictures(prompts: int, each: int, sources: Sequence[Any]) -> int:
    """How many pictures: as many as the prompts ask for; a single prompt is repeated for its seeds."""
    counts = [len(rows) for rows in sources if isinstance(rows, (Sequence, torch.Tensor))]
    asked, noises = prompts * each, max(counts, default=0)
    return noises if prompts == 1 and each == 1 and noises else asked


def one_step_pipeline(name: str = "student") -> tuple[EMDOneStepPipeline, StudentPreset]:
    """The portraits model with a shipped student loaded, and the student's preset."""
    from ..portraits import load_portraits
    from ..portraits.shipped import student_file

    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_student(student_file(name), base="portraits")


def student_scheduler(pipe: DiffusionPipeline, student: str | StudentSampling) -> tuple[Any, dict[str, Any]]:
    """The scheduler of a student and the arguments of the pipeline's call.

    Example:
        >>> pipe.load_lora_weights("sdxl_lightning_4step_lora.safetensors")
        >>> pipe.scheduler, arguments = student_scheduler(pipe, "SDXL-Lightning, 4 steps")
        >>> images = pipe("a prompt", **arguments).images

    Args:
        pipe: of the student's base, with its weights or its LoRA loaded.
        student: a name in :data:`vitrine.engine.emd.STUDENTS`, or the settings themselves.
    """
    sampling = known(student) if isinstance(student, str) else student
    adapter = Adapter(pipe)
    schedule, _ = convention_of(pipe.scheduler, adapter.network)
    if adapter.is_unet and schedule.kind == "flow":
        shown = f"a flow ({type(pipe.scheduler).__name__})"
        raise refuse("scheduler", shown, "one with the base's table of betas", "pass the pipeline as it was published")
    check_student(sampling, adapter.network)
    if not adapter.is_unet:
        return _flow_scheduler(pipe, sampling)
    import diffusers

    kinds = {
        "euler": diffusers.EulerDiscreteScheduler,
        "euler_ancestral": diffusers.EulerAncestralDiscreteScheduler,
        "lcm": diffusers.LCMScheduler,
        "tcd": diffusers.TCDScheduler,
    }
    changes: dict[str, Any] = {"timestep_spacing": "trailing"}
    if sampling.prediction != "model":
        changes["prediction_type"] = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}[sampling.prediction]
    scheduler = kinds[sampling.sampler].from_config(pipe.scheduler.config, **changes)
    arguments: dict[str, Any] = {"guidance_scale": sampling.trained_guidance or 1.0}
    if sampling.sampler == "euler_ancestral":  # takes no timesteps of one's own; trailing gives the same
        arguments["num_inference_steps"] = len(sampling.timesteps)
        scheduler.set_timesteps(len(sampling.timesteps))
        if scheduler.timesteps.tolist() != list(sampling.timesteps):
            raise refuse("timesteps", sampling.timesteps, scheduler.timesteps.tolist(), "euler takes any others")
    else:
        arguments["timesteps"] = [int(t) for t in sampling.timesteps]
    if sampling.sampler == "tcd":
        arguments["eta"] = sampling.eta
    return scheduler, arguments


def _flow_scheduler(pipe: DiffusionPipeline, sampling: StudentSampling) -> tuple[Any, dict[str, Any]]:
    """Levels are given as they are, so the scheduler must not shift them again."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    plain: dict[str, Any] = {"shift": 1.0, "use_dynamic_shifting": False, "shift_terminal": None}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **plain)
    arguments: dict[str, Any] = {"sigmas": [t / 1000 for t in sampling.timesteps]}
    name, none = family_of(pipe.transformer).guidance
    return scheduler, arguments | {name: none}
