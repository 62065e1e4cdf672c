"""SDXL- and PixArt-shaped pipelines that take control, and the text states they are given."""

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, PixArtAlphaPipeline, StableDiffusionXLPipeline
from vitrine.engine.control import (
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    SizeCondition,
    control_width,
    save_control,
)
from vitrine.engine.pipelines import ControlConditionedPipeline
from vitrine_tests import models

FAR = SizeCondition(original=(16, 24), crop=(8, 4))
OFF, NEVER = GammaConfig("constant"), GammaConfig("step", step_at=0.0)
SHORT = {"num_inference_steps": 3, "output_type": "latent", "height": 64, "width": 64}
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def louder(net, part):
    """The size embedder's random weights enlarged, so that sizes matter."""
    with torch.no_grad():
        for p in net.get_submodule(part).parameters():
            p.mul_(6)
    return net.eval()


def euler():
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **betas)


def pipeline(kind, **parts):
    """Without text encoders, and silent."""
    made = ControlConditionedPipeline.from_pipe(kind(vae=models.vae(), **parts))
    made.set_progress_bar_config(disable=True)
    return made


def xl_pipeline():
    unet = models.unet_xl(sample_size=8, block_out_channels=(32, 64), norm_num_groups=32, addition_time_embed_dim=256)
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return pipeline(StableDiffusionXLPipeline, unet=louder(unet, "add_embedding"), scheduler=euler(), **parts)


def pixart_pipeline():
    net = louder(models.pixart(sample_size=8, use_additional_conditions=True), "adaln_single.emb.resolution_embedder")
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": DDIMScheduler(steps_offset=1)}
    return pipeline(PixArtAlphaPipeline, transformer=net, **parts)


def texts(count=1):
    return {
        "prompt_embeds": seeded(count, 7, 24, seed=1),
        "pooled_prompt_embeds": seeded(count, 20, seed=2),
        "negative_prompt_embeds": seeded(count, 7, 24, seed=3),
        "negative_pooled_prompt_embeds": seeded(count, 20, seed=4),
    }


def ours(pipe, gamma=None, guidance=None, size_condition=FAR, **how):
    count = len(how.get("latents", [0]))
    settings = {"num_inference_steps": 4, "output_type": "latent", **texts(count)} | how
    return pipe(size_condition=size_condition, gamma=gamma, guidance=guidance or GuidanceConfig(4.0), **settings)


def checkpoint(pipe, folder, zero_init=False, extra=None, **facts):
    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(pipe.unet), zero_init)
    about = ControlMetadata("UNet2DConditionModel", made.dim, **{"gamma": GammaConfig(alpha=2.0)} | facts)
    return save_control(folder / "control.safetensors", made.state_dict(), about, extra)
