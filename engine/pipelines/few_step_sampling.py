"""A published student's sampling, for stock diffusers pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..diffusion.schedule import convention_of
from ..emd.published_students import StudentSampling, check_student, known
from ..errors import refuse
from ..families import family_of
from .adapter import Adapter

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


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
        return _flow(pipe, sampling)
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
    arguments: dict[str, Any] = {"guidance_scale": sampling.trained_guidance or sampling.guidance}
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


def _flow(pipe: DiffusionPipeline, sampling: StudentSampling) -> tuple[Any, dict[str, Any]]:
    """Levels are given as they are, so the scheduler must not shift them again."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    plain: dict[str, Any] = {"shift": 1.0, "use_dynamic_shifting": False, "shift_terminal": None}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **plain)
    arguments: dict[str, Any] = {"sigmas": [t / 1000 for t in sampling.timesteps]}
    name, none = family_of(pipe.transformer).guidance
    return scheduler, arguments | {name: sampling.guidance - 1.0 + none}
