"""Activation Tap as diffusers pipelines: Stable Diffusion, SDXL, and every other model of a known family.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from diffusers import (
    AutoencoderKL,
    SchedulerMixin,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..errors import refuse
from .from_parts import FromParts
from .tap_base import ActivationTapPipelineOutput, TapPipeline
from .wrapping import AroundPipeline

__all__ = [
    "ActivationTapPipeline",
    "ActivationTapPipelineOutput",
    "ActivationTapTransformerPipeline",
    "ActivationTapXLPipeline",
]


class ActivationTapPipeline(TapPipeline, FromParts):
    """Tap Stable Diffusion 1.x / 2.x and models of their shape.

    ::

        pipe = ActivationTapPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
        out = pipe(image, "a photo of a horse", preset="Ours-v1.5", size=512, seeds=range(8))
        out.activations["up-level1-repeat1-vit-block0-cross-q"].tensor   # (1, 1280, 16, 16)
        out.activations.save("horse.safetensors")
    """

    model_cpu_offload_seq = "text_encoder->vae->unet"
    _stock = "StableDiffusionPipeline"
    encode_prompt = StableDiffusionPipeline.encode_prompt

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        tokenizer: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: SchedulerMixin,
    ) -> None:
        super().__init__()
        if unet.config.addition_embed_type is not None:
            shown = f"a UNet with addition_embed_type {unet.config.addition_embed_type!r}"
            raise refuse("unet", shown, "SD 1.x or 2.x", "use ActivationTapXLPipeline for SDXL")
        self.register_modules(vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler)


class ActivationTapXLPipeline(TapPipeline, FromParts):
    """Tap SDXL: two text encoders, pooled text, and time ids (H, W, 0, 0, H, W) as GDF gives them."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->vae->unet"
    _stock = "StableDiffusionXLPipeline"
    encode_prompt = StableDiffusionXLPipeline.encode_prompt

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        text_encoder_2: CLIPTextModelWithProjection,
        tokenizer: CLIPTokenizer,
        tokenizer_2: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: SchedulerMixin,
        force_zeros_for_empty_prompt: bool = True,
    ) -> None:
        super().__init__()
        if unet.config.addition_embed_type != "text_time":
            shown = f"a UNet with addition_embed_type {unet.config.addition_embed_type!r}"
            raise refuse("unet", shown, "an SDXL base UNet ('text_time')", "use ActivationTapPipeline for SD 1.x, 2.x")
        self.register_modules(
            vae=vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, tokenizer=tokenizer,
            tokenizer_2=tokenizer_2, unet=unet, scheduler=scheduler,
        )  # fmt: skip
        self.register_to_config(force_zeros_for_empty_prompt=force_zeros_for_empty_prompt)  # encode_prompt reads it


class ActivationTapTransformerPipeline(TapPipeline, AroundPipeline):
    """Tap any model of a known family through its own pipeline, which encodes the prompts.

    ::

        pipe = ActivationTapPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        pipe(image, "a photo of a horse", addresses="vit-block15-out", timestep=260).activations
    """

    _needed = ("vae", "transformer", "scheduler")


ActivationTapPipeline._forms = {"xl": ActivationTapXLPipeline, "transformer": ActivationTapTransformerPipeline}
