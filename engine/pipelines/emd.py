"""One-step generation as a diffusers pipeline, with repair of its samples.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput

from ..condition import Condition
from ..denoiser import Denoiser
from ..emd import (
    PRESETS,
    CorrectConfig,
    Networks,
    StudentContract,
    check_base,
    check_network,
    correct,
    one_step,
    read_student,
)
from ..errors import refuse
from ..noise import seeded_noise
from ..progress import Progress, silent
from .shared import SharedPipeline


class EMDOneStepPipeline(SharedPipeline, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x whose UNet is a one-step student (EM Distillation, Xie et al., NeurIPS 2024).

    Example:
        >>> pipe = EMDOneStepPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> contract = pipe.load_student("student_kohya.safetensors")
        >>> images = pipe("a prompt", seeds=[0], contract=contract).images
    """

    def load_student(
        self, path: str | Path, base: str = "", adapter_name: str = "generator", *, preset: str | None = None,
        contract: StudentContract | None = None,
    ) -> StudentContract:  # fmt: skip
        """Load a student, a LoRA in any names that diffusers reads or a whole UNet, and return its contract.

        Args:
            base: name of this model; a student of another one is refused.
            preset: a published student's name in :data:`vitrine.engine.emd.PRESETS`, for files without a contract.
            contract: the same, written out.

        Raises:
            VitrineError: The file has no contract and none was given, or it is a student of another base or
                architecture.
        """
        if preset is not None and preset not in PRESETS:
            raise refuse("preset", preset, sorted(PRESETS), "or pass contract=StudentContract(...)")
        chosen = contract or (PRESETS[preset] if preset is not None else None)
        contract, tensors = read_student(path, chosen, any_names=True)
        check_base(contract, base)
        check_network(contract, self.unet)
        if any(".lora" in key or key.startswith("lora_") for key in tensors):
            self.load_lora_weights(tensors, adapter_name=adapter_name)
        else:
            self._load_unet(tensors, Path(path).name)
        return contract

    def _load_unet(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        unet = copy.deepcopy(self.unet)  # this one may be shared with the pipeline that ``from_pipe`` took it from
        shapes = {key: value.shape for key, value in unet.state_dict().items()}
        keys = shapes.keys() | tensors.keys()
        differing = [key for key in keys if key not in tensors or tensors[key].shape != shapes.get(key)]
        if differing:
            shown, accepted = f"{len(differing)} tensors of {name} differ", "the tensors of this pipeline's UNet"
            raise refuse("student UNet", shown, accepted, "load the matching base")
        unet.load_state_dict(tensors)
        self.register_modules(unet=unet)

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        prompt: str | list[str],
        seeds: list[int] | None = None,
        contract: StudentContract | None = None,
        *,
        latents: torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "pil",
        correction: CorrectConfig | None = None,
        teacher: Denoiser | None = None,
        score: Denoiser | None = None,
        progress: Progress = silent,
    ) -> StableDiffusionPipelineOutput:
        """One UNet call for all pictures, then the VAE.

        Args:
            prompt: one for all seeds, or one for each.
            seeds: one for each picture; default 0, 1, ... for the prompts.
            contract: t* and noise convention; by default 999 and unit.
            latents: (B, C, H, W) z ~ N(0, I) instead of seeds.
            guidance_scale: 0 or 1; guidance is distilled in.
            output_type: ``"pil"``, ``"pt"`` or ``"latent"``.
            correction: repair settings; needs ``teacher`` and ``score``.
            teacher, score: the base model and the student's own score network.

        Raises:
            VitrineError: Guidance is neither 0 nor 1, the counts do not match, or a correction lacks its networks.
        """
        if guidance_scale not in (0.0, 1.0):
            raise refuse("guidance_scale", guidance_scale, "0 or 1", "guidance is distilled into a one-step student")
        if correction is not None and (teacher is None or score is None):
            raise refuse("correction", "no teacher or score network", "both", "pass teacher= and score=")
        contract = contract or StudentContract()
        check_network(contract, self.unet)
        prompts, seeds = _paired(prompt, seeds, latents)
        z = latents if latents is not None else seeded_noise(seeds, self._shape(contract))
        with self._in_use():
            z = z.to(self._execution_device)
            cond = Condition(self.encode_prompt(prompts, self._execution_device, 1, False)[0])
            student = Denoiser.from_diffusers(self)
            if correction is None or teacher is None or score is None:
                x0 = one_step(student, z, cond, contract)
            else:
                networks = Networks(student, teacher, score)
                x0, _ = correct(networks, z, cond, contract, correction, seeds, None, progress)
            images = self._decoded(x0, output_type)
        return StableDiffusionPipelineOutput(images=images, nsfw_content_detected=None)

    def _decoded(self, x0: torch.Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x0
        pixels = self.vae.decode(x0.to(self.vae.dtype) / self.vae.config.scaling_factor).sample
        return self.image_processor.postprocess(pixels, output_type=output_type)

    def _shape(self, contract: StudentContract) -> tuple[int, ...]:
        side = self.unet.config.sample_size
        height, width = (side, side) if isinstance(side, int) else side
        return contract.shape or (self.unet.config.in_channels, height, width)


def _paired(
    prompt: str | list[str], seeds: list[int] | None, latents: torch.Tensor | None
) -> tuple[list[str], list[int]]:
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if seeds is None:
        seeds = list(range(len(prompts) if latents is None else len(latents)))
    prompts = prompts * len(seeds) if len(prompts) == 1 else prompts
    if len(prompts) != len(seeds) or (latents is not None and len(latents) != len(seeds)):
        raise refuse("seeds", len(seeds), f"{len(prompts)} prompts", "give one seed for each picture")
    return prompts, list(seeds)


def one_step_pipeline(name: str = "student") -> tuple[EMDOneStepPipeline, StudentContract]:
    """The portraits model with a shipped student loaded, and the student's contract."""
    from ..portraits import load_portraits
    from ..portraits.shipped import student_file

    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_student(student_file(name), base="portraits")
