"""Tiny stock pipelines of every family and what a call takes: prompts, or encoded ones where the reader is not tiny."""

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    ChromaPipeline,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Lumina2Pipeline,
    PixArtAlphaPipeline,
    QwenImagePipeline,
)
from vitrine_tests import models
from vitrine_tests.families.twin import network
from vitrine_tests.machine import stock
from vitrine_tests.pipelines.test_family_taps import MAKERS, shifted_vae, t5, tokenizer

STEPS = {"num_inference_steps": 2, "output_type": "latent"}


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _schedule():
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def _per_channel_vae():
    config = {
        "base_dim": 4,
        "z_dim": 16,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    return models.seeded(AutoencoderKLQwenImage, config, 1)


def qwen_image():
    pipe = QwenImagePipeline(_schedule(), _per_channel_vae(), None, None, network("qwen_image"))
    told = {"prompt_embeds": states(1, 7, 20), "negative_prompt_embeds": states(1, 7, 20, seed=1)}
    masks = {"prompt_embeds_mask": torch.ones(1, 7).long(), "negative_prompt_embeds_mask": torch.ones(1, 7).long()}
    return pipe, told | masks | {"true_cfg_scale": 2.0}


def krea2():
    pipe = Krea2Pipeline(_schedule(), _per_channel_vae(), None, None, network("krea2"), [1, 2, 3])
    told = {"prompt_embeds": states(1, 7, 3, 32), "negative_prompt_embeds": states(1, 7, 3, 32, seed=1)}
    masks = {"prompt_embeds_mask": torch.ones(1, 7).bool(), "negative_prompt_embeds_mask": torch.ones(1, 7).bool()}
    return pipe, told | masks


def lumina2():
    pipe = Lumina2Pipeline(network("lumina2"), _schedule(), shifted_vae(latent_channels=16), None, None)
    told = {"prompt_embeds": states(1, 7, 20), "negative_prompt_embeds": states(1, 7, 20, seed=1)}
    masks = {
        "prompt_attention_mask": torch.ones(1, 7).long(),
        "negative_prompt_attention_mask": torch.ones(1, 7).long(),
    }
    return pipe, told | masks


def chroma():
    net = network("chroma")
    return ChromaPipeline(_schedule(), shifted_vae(latent_channels=16), t5(20), tokenizer(), net)


def _prompted(make):
    def source():
        return make(), {"prompt": "a photo of a cat"}

    return source


READING = [*MAKERS, "sdxl", "chroma"]
"""Families whose prompts are read by tiny text encoders."""
SOURCES = {name: _prompted(make) for name, make in MAKERS.items()} | {
    "sdxl": _prompted(stock.sdxl),
    "chroma": _prompted(chroma),
}
SOURCES |= {make.__name__: make for make in (qwen_image, krea2, lumina2)}
SIDES = {"wan": 32, "pixart": 128}
"""Other sides than 64 px. PixArt's is the one it is built for: at another its table is rebuilt."""


def source(name):
    """(pipeline, arguments of a short call)."""
    pipe, told = SOURCES[name]()
    pipe.set_progress_bar_config(disable=True)
    side = SIDES.get(name, 64)
    told |= STEPS | {"height": side, "width": side}
    if name == "wan":
        told |= {"num_frames": 1}
    if isinstance(pipe, PixArtAlphaPipeline):
        told |= {"use_resolution_binning": False}
    return pipe, told


def backbone(pipe):
    unet = getattr(pipe, "unet", None)
    return pipe.transformer if unet is None else unet


def drawn(pipe, told, seed=3, **more):
    """Latents of a call."""
    if "seeds" not in more:
        more["generator"] = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return pipe(**told | more)[0]
