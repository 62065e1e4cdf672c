"""One-step generation as a diffusers pipeline, with repair of its samples.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from ..emd import StudentPreset
from .emd_tools import OneStepTools
from .from_parts import FromParts
from .wrapping import AroundPipeline


class EMDOneStepPipeline(OneStepTools, FromParts, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x whose UNet is a one-step student (EM Distillation, Xie et al., NeurIPS 2024).

    Example:
        >>> pipe = EMDOneStepPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> preset = pipe.load_student("student_kohya.safetensors")
        >>> images = pipe("a prompt", seeds=[0], preset=preset).images
    """


class EMDOneStepXLPipeline(OneStepTools, FromParts, StableDiffusionXLPipeline):
    """SDXL whose UNet is a one-step student, as :class:`EMDOneStepPipeline`.

    Example:
        >>> pipe = EMDOneStepXLPipeline.from_pipe(StableDiffusionXLPipeline.from_pretrained("path/to/sdxl"))
        >>> preset = pipe.load_student("dmd2_sdxl_1step_unet.safetensors", preset="DMD2 SDXL 1-step (UNet)")
        >>> images = pipe("a prompt", seeds=[0], preset=preset).images
    """


class EMDOneStepTransformerPipeline(OneStepTools, AroundPipeline):
    """Any transformer of a known family as a one-step student; of a flow, x0 = z - v(z, t*) at t* = 1000.

    ::

        pipe = EMDOneStepPipeline.from_pipe(FluxPipeline.from_pretrained("path/to/schnell"))
        images = pipe("a prompt", seeds=[0]).images

    Encoded prompts are taken with what the other pipeline's call takes with them: ``pooled_prompt_embeds``,
    ``prompt_embeds_mask`` or ``prompt_attention_mask``.
    """

    _needed = ("vae", "transformer", "scheduler")


EMDOneStepPipeline._forms = {"xl": EMDOneStepXLPipeline, "transformer": EMDOneStepTransformerPipeline}


def one_step_pipeline(name: str = "student") -> tuple[EMDOneStepPipeline, StudentPreset]:
    """The portraits model with a shipped student loaded, and the student's preset."""
    from ..portraits import load_portraits
    from ..portraits.shipped import student_file

    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_student(student_file(name), base="portraits")
