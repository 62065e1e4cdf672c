"""One-step generation as a diffusers pipeline, with repair of its samples.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from typing import Any

from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline

from ..emd import StudentPreset
from .emd_tools import OneStepTools
from .prompt_encoding import reads_sizes


class EMDOneStepPipeline(OneStepTools, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x whose UNet is a one-step student (EM Distillation, Xie et al., NeurIPS 2024).

    Example:
        >>> pipe = EMDOneStepPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> contract = pipe.load_student("student_kohya.safetensors")
        >>> images = pipe("a prompt", seeds=[0], contract=contract).images
    """

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline around the components of another: this class for Stable Diffusion 1.x and 2.x.

        SDXL becomes an :class:`EMDOneStepXLPipeline`. A pipeline with a transformer of a known family is kept whole,
        and becomes an :class:`EMDOneStepTransformerPipeline`.

        Raises:
            VitrineError: If the other pipeline lacks a component, or its model is of no known family.
        """
        from .emd_around import EMDOneStepTransformerPipeline

        unet = getattr(pipeline, "unet", None)
        if getattr(pipeline, "transformer", None) is not None:
            return EMDOneStepTransformerPipeline.from_pipe(pipeline, **kwargs)
        if unet is not None and reads_sizes(unet):
            return EMDOneStepXLPipeline.from_pipe(pipeline, **kwargs)
        return super().from_pipe(pipeline, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """From a folder or hub repository, as :meth:`from_pipe` of its pipeline."""
        hub = ("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision")
        path = pretrained_model_name_or_path
        parts = cls.load_config(path, **{name: kwargs[name] for name in hub if name in kwargs})
        if "transformer" in parts or "text_encoder_2" in parts:
            return cls.from_pipe(DiffusionPipeline.from_pretrained(path, **kwargs))
        return super().from_pretrained(path, **kwargs)


class EMDOneStepXLPipeline(OneStepTools, StableDiffusionXLPipeline):
    """SDXL whose UNet is a one-step student, as :class:`EMDOneStepPipeline`.

    Example:
        >>> pipe = EMDOneStepXLPipeline.from_pipe(StableDiffusionXLPipeline.from_pretrained("path/to/sdxl"))
        >>> contract = pipe.load_student("dmd2_sdxl_1step_unet.safetensors", preset="DMD2 SDXL 1-step (UNet)")
        >>> images = pipe("a prompt", seeds=[0], contract=contract).images
    """


def one_step_pipeline(name: str = "student") -> tuple[EMDOneStepPipeline, StudentPreset]:
    """The portraits model with a shipped student loaded, and the student's contract."""
    from ..portraits import load_portraits
    from ..portraits.shipped import student_file

    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_student(student_file(name), base="portraits")
