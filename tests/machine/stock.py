"""A small stock pipeline of each family with text encoders and VAE, made anew at each call: float32, on the CPU.

SD is the portraits model, with its trained weights; the others are random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel
from vitrine.engine.nemo import Calibration
from vitrine.engine.portraits import build_models, load_portraits
from vitrine.engine.tracing.fingerprint import active_fingerprint_of
from vitrine_tests import models

WIDTH = 64
"""Of the portraits' text encoder, whose kind the others share."""


def sd() -> Any:
    return load_portraits().pipeline()


def _parts(seed: int) -> Any:
    made = build_models(seed)
    made.vae.register_to_config(shift_factor=0.1)  # SD3 and Flux need one, the others have none in their formula
    return made


def stable_diffusion(parts: Any, scheduler: Any) -> Any:
    """A stock pipeline of the networks of a portraits model."""
    return StableDiffusionPipeline(
        parts.vae, parts.text_encoder, parts.tokenizer, parts.unet, scheduler, None, None, requires_safety_checker=False
    )


def _projected(parts: Any, seed: int) -> CLIPTextModelWithProjection:
    return models.seeded(CLIPTextModelWithProjection, {"config": parts.text_encoder.config}, seed)


def _t5(parts: Any, seed: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(parts.tokenizer),
        d_model=WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=1,
        eos_token_id=1,
    )
    return models.seeded(T5EncoderModel, {"config": config}, seed)


def _betas() -> dict[str, Any]:
    return {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def sdxl() -> Any:
    parts = _parts(3)
    unet = models.unet_xl(
        block_out_channels=(32, 64),
        cross_attention_dim=2 * WIDTH,
        norm_num_groups=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
    )
    return StableDiffusionXLPipeline(
        parts.vae,
        parts.text_encoder,
        _projected(parts, 4),
        parts.tokenizer,
        parts.tokenizer,
        unet,
        EulerDiscreteScheduler(timestep_spacing="leading", **_betas()),
        add_watermarker=False,
    )


def deep_sdxl(scheduler: Any = None) -> Any:
    """SDXL whose lower level has two transformer blocks in a row, by default with the portraits' scheduler."""
    parts = build_models(seed=3)
    second = CLIPTextModelWithProjection(parts.text_encoder.config).eval()
    unet = models.unet_xl(
        block_out_channels=(32, 64),
        cross_attention_dim=2 * WIDTH,
        attention_head_dim=4,
        use_linear_projection=False,
        norm_num_groups=32,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
    )
    readers = (parts.text_encoder, second, parts.tokenizer, parts.tokenizer)
    pipe = StableDiffusionXLPipeline(parts.vae, *readers, unet, scheduler or parts.scheduler, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pixart(sizes: bool = False) -> Any:
    parts = _parts(5)
    net = models.pixart(caption_channels=WIDTH, use_additional_conditions=sizes)
    return PixArtAlphaPipeline(parts.tokenizer, _t5(parts, 6), parts.vae, net, DDIMScheduler(**_betas()))


def sd3() -> Any:
    parts = _parts(7)
    net = models.sd3(joint_attention_dim=2 * WIDTH, pooled_projection_dim=2 * WIDTH)
    first, second = _projected(parts, 8), _projected(parts, 9)
    return StableDiffusion3Pipeline(
        net,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        parts.vae,
        first,
        parts.tokenizer,
        second,
        parts.tokenizer,
        None,
        None,
    )


def flux() -> Any:
    parts = _parts(10)
    net = models.flux(joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return FluxPipeline(scheduler, parts.vae, parts.text_encoder, parts.tokenizer, _t5(parts, 11), parts.tokenizer, net)


def pixart_1024() -> Any:
    """With size inputs, as the models of 1024 pixels have them."""
    return pixart(sizes=True)


MAKERS = {"sd": sd, "sdxl": sdxl, "pixart": pixart, "pixart-1024": pixart_1024, "sd3": sd3, "flux": flux}


def stock(family: str) -> Any:
    """A fresh, silent pipeline of a family."""
    pipe = MAKERS[family]()
    pipe.set_progress_bar_config(disable=True)
    for part in modules(pipe).values():
        part.requires_grad_(False)
    return pipe


def modules(pipe: Any) -> dict[str, torch.nn.Module]:
    """Its networks by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def backbone(pipe: Any) -> torch.nn.Module:
    """Its UNet or transformer."""
    return pipe.unet if getattr(pipe, "unet", None) is not None else pipe.transformer


@contextmanager
def used(pipe: Any) -> Iterator[None]:
    """Engine functions run a network themselves; a user frees the pipeline's models afterwards."""
    try:
        yield
    finally:
        pipe.maybe_free_model_hooks()


def valid_for(pipe: Any, calibration: Calibration) -> Calibration:
    """The same numbers as those of the model with its adapter: the one that is loaded here changes nothing yet."""
    net = backbone(pipe)
    if not any("lora_" in name for name, _ in net.named_modules()):
        return calibration
    statistics = dataclasses.replace(calibration.known("statistics"), fingerprint=active_fingerprint_of(net))
    return dataclasses.replace(calibration, statistics=statistics)
