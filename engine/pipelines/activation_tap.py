"""Activation Tap as diffusers pipelines: Stable Diffusion, SDXL, and every other model of a known family.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ModelMixin, SchedulerMixin, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..errors import refuse
from ..network.condition import Condition
from .around import MASKS, AroundPipeline
from .tap_base import ActivationTapPipelineOutput, TapPipeline

__all__ = [
    "ActivationTapPipeline",
    "ActivationTapPipelineOutput",
    "ActivationTapTransformerPipeline",
    "ActivationTapXLPipeline",
]


class Fitting(TapPipeline):
    """A pipeline whose ``from_pipe`` makes the form that fits a model."""

    _forms: ClassVar[dict[str, type[TapPipeline]]] = {}

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline around the components of another, each as it is, of the form that its model needs.

        Stable Diffusion 1.x and 2.x, SDXL, and every pipeline with a transformer of a known family.

        Raises:
            VitrineError: If the other pipeline lacks a component, or its model is of no known family.
        """
        unet = getattr(pipeline, "unet", None)
        xl = unet is not None and getattr(unet.config, "addition_embed_type", None) == "text_time"
        form = "xl" if xl else "transformer" if getattr(pipeline, "transformer", None) is not None else ""
        if form in cls._forms:
            return cls._forms[form].from_pipe(pipeline, **kwargs)
        return super().from_pipe(pipeline, **kwargs)


class ActivationTapPipeline(Fitting):
    """Tap Stable Diffusion 1.x / 2.x and models of their shape.

    ::

        pipe = ActivationTapPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
        out = pipe(image, "a photo of a horse", preset="Ours-v1.5", size=512, seeds=range(8))
        out.activations["up-level1-repeat1-vit-block0-cross-q"].tensor   # (1, 1280, 16, 16)
        out.activations.save("horse.safetensors")
    """

    model_cpu_offload_seq = "text_encoder->vae->unet"
    _stock = "StableDiffusionPipeline"

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

    def _encode(self, prompts: list[str]) -> Condition:
        return Condition(text=self._text(self.tokenizer, self.text_encoder, prompts).last_hidden_state)


class ActivationTapXLPipeline(TapPipeline):
    """Tap SDXL: two text encoders, pooled text, and time ids (H, W, 0, 0, H, W) as GDF gives them."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->vae->unet"
    _stock = "StableDiffusionXLPipeline"

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        text_encoder_2: CLIPTextModelWithProjection,
        tokenizer: CLIPTokenizer,
        tokenizer_2: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: SchedulerMixin,
    ) -> None:
        super().__init__()
        if unet.config.addition_embed_type != "text_time":
            shown = f"a UNet with addition_embed_type {unet.config.addition_embed_type!r}"
            raise refuse("unet", shown, "an SDXL base UNet ('text_time')", "use ActivationTapPipeline for SD 1.x, 2.x")
        self.register_modules(
            vae=vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, tokenizer=tokenizer,
            tokenizer_2=tokenizer_2, unet=unet, scheduler=scheduler,
        )  # fmt: skip

    def _encode(self, prompts: list[str]) -> Condition:
        first = self._text(self.tokenizer, self.text_encoder, prompts, output_hidden_states=True)
        second = self._text(self.tokenizer_2, self.text_encoder_2, prompts, output_hidden_states=True)
        return Condition(torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds)

    def _sized(self, cond: Condition, height: int, width: int) -> Condition:
        assert cond.text is not None
        if cond.pooled is None:
            raise refuse("prompt_embeds", "without pooled_prompt_embeds", "both", "SDXL takes pooled text too")
        time_ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=cond.text.dtype, device=cond.text.device)
        return replace(cond, extra={"time_ids": time_ids.repeat(len(cond.text), 1)})


class ActivationTapTransformerPipeline(AroundPipeline, TapPipeline):
    """Tap any model of a known family through its own pipeline, which encodes the prompts.

    ::

        pipe = ActivationTapPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        pipe(image, "a photo of a horse", addresses="vit-block15-out", timestep=260).activations
    """

    model_cpu_offload_seq = "vae->transformer"
    _masks = MASKS

    def __init__(self, vae: ModelMixin, transformer: ModelMixin, scheduler: SchedulerMixin) -> None:
        super().__init__()
        self.register_modules(vae=vae, transformer=transformer, scheduler=scheduler)

    def own_size(self) -> int:
        """Side in pixels of the square pictures that the model's own pipeline generates."""
        return max(self._usual_size())


ActivationTapPipeline._forms = {"xl": ActivationTapXLPipeline, "transformer": ActivationTapTransformerPipeline}
