"""Anima's network, tiny, in both libraries (without the conditioner, whose size is fixed)."""

from types import SimpleNamespace

import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "Anima"
SIZE = (8, 12)
EPS = 1e-6

if not hasattr(transformer_cosmos, "transforms"):  # without torchvision: its nearest resizing, which leaves zeros
    transformer_cosmos.transforms = SimpleNamespace(
        InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        functional=SimpleNamespace(
            resize=lambda x, size, interpolation: torch.nn.functional.interpolate(x, size=size, mode=interpolation)
        ),
    )


def diffusers(seed=0):
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "num_layers": 2,
        "text_embed_dim": 1024,
        "adaln_lora_dim": 16,
        "rope_scale": (1.0, 4.0, 4.0),
        "extra_pos_embed_type": None,
    }
    return models.seeded(CosmosTransformer3DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT

    return MiniTrainDIT(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2,
        patch_temporal=1, concat_padding_mask=True, model_channels=64, num_blocks=2, num_heads=2,
        crossattn_emb_channels=1024, pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=16,
        rope_h_extrapolation_ratio=4.0, rope_w_extrapolation_ratio=4.0, rope_t_extrapolation_ratio=1.0,
        rope_enable_fps_modulation=False, extra_per_block_abs_pos_emb=False, **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 1024))


def run(net, x, t, cond):
    return net(x[:, :, None], t / 1000, cond.text, transformer_options={})[:, :, 0]
