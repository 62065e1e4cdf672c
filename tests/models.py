"""Small networks of every family, with the real classes and random weights.

Each call makes a fresh one, in ``eval`` mode, and seeds torch's generator first; ``shared`` makes one of each kind and
hands the same one to all, for tests that change no weights. ``changes`` go into diffusers' config.
"""

import functools
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

TEXT, POOLED = 24, 20  # widths of text states and of pooled text
ATTENTION_LAST = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
ATTENTION_FIRST = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
SD15: dict[str, Any] = {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64}
SD21: dict[str, Any] = {
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "sample_size": 96,
}
SDXL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
}


def seeded(kind, config, seed):
    torch.manual_seed(seed)
    return kind(**config).eval()


def outline(**config):
    """A UNet of any size without weights, for its names and widths."""
    with torch.device("meta"):
        return UNet2DConditionModel(**config).eval()


# --- UNets ----------------------------------------------------------------------------------------------------------
def unet(seed=0, **changes):
    """SD1-shaped; changes of its levels bring their own block types, four levels have diffusers' own."""
    config = {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "cross_attention_dim": TEXT,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
    }
    levels = len(changes.get("block_out_channels", (16, 32)))
    return seeded(UNet2DConditionModel, config | (ATTENTION_FIRST if levels == 2 else {}) | changes, seed)


def unet_v(seed=0, **changes):
    """SD2-v-shaped: linear projections and as many heads as each level's width asks for."""
    return unet(seed, **{"use_linear_projection": True, "attention_head_dim": (2, 4)} | changes)


def unet_xl(seed=0, **changes):
    """SDXL-shaped: pooled text and size conditioning, attention in the lower level alone."""
    wave = changes.get("addition_time_embed_dim", 8)
    config = ATTENTION_LAST | {
        "use_linear_projection": True,
        "attention_head_dim": (2, 4),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": wave,
        "projection_class_embeddings_input_dim": POOLED + 6 * wave,
    }
    return unet(seed, **config | changes)


# --- transformers ---------------------------------------------------------------------------------------------------
def dit(seed=0, **changes):
    """Classes in place of text."""
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
        "num_embeds_ada_norm": 4,
    }
    return seeded(DiTTransformer2DModel, config | changes, seed)


def pixart(seed=0, **changes):
    """Predicts noise and variance; ``use_additional_conditions=True`` adds the sizes."""
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "sample_size": 16,
        "patch_size": 2,
        "cross_attention_dim": 24,
        "caption_channels": TEXT,
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
    }
    return seeded(PixArtTransformer2DModel, config | changes, seed)


def sd3(seed=0, **changes):
    """SD3; ``dual_attention_layers=(0,), qk_norm="rms_norm"`` make it SD3.5 medium."""
    config = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "caption_projection_dim": 32,
        "pooled_projection_dim": POOLED,
        "out_channels": 4,
        "pos_embed_max_size": 16,
    }
    return seeded(SD3Transformer2DModel, config | changes, seed)


def flux(seed=0, **changes):
    """Takes packed latents of four channels; ``guidance_embeds=True`` makes it the distilled one."""
    config = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "pooled_projection_dim": POOLED,
        "axes_dims_rope": (4, 6, 6),
    }
    return seeded(FluxTransformer2DModel, config | changes, seed)


# --- beside the denoiser --------------------------------------------------------------------------------------------
def vae(seed=1, levels=4, **changes):
    """One step of ``levels - 1`` halvings."""
    config = {
        "block_out_channels": (4,) * levels,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
    }
    return seeded(AutoencoderKL, config | changes, seed)


def text_encoder(seed=2, projected=False, **changes):
    """CLIP's text encoder; ``projected`` gives SDXL's second kind, which pools."""
    config = CLIPTextConfig(**{
        "vocab_size": 96, "hidden_size": TEXT, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16, "projection_dim": POOLED, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 1,
    } | changes)  # fmt: skip
    return seeded(CLIPTextModelWithProjection if projected else CLIPTextModel, {"config": config}, seed)


@functools.cache
def _shared(make, changes):
    return make(**dict(changes)).requires_grad_(False)


def shared(make, **changes):
    """One frozen network of ``make(**changes)`` for all; what a test draws next does not depend on who made it."""
    network = _shared(make, tuple(sorted(changes.items())))
    torch.manual_seed(changes.get("seed", 0))
    return network
