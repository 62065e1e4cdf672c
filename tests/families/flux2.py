"""Flux.2 dev, tiny, in both libraries."""

import torch
from diffusers import Flux2Transformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "Flux2"
CONFIG_KEYS = {"hidden_size": 64, "out_channels": 128}
SIZE, CHANNELS = (4, 6), 128
EPS = 1.1920928955078125e-07


def diffusers(seed=0, guidance=True):
    config = {
        "patch_size": 1,
        "in_channels": 128,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "axes_dims_rope": (8, 8, 8, 8),
        "guidance_embeds": guidance,
    }
    return models.seeded(Flux2Transformer2DModel, config, seed)


def comfyui(ops, guidance=True):
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=20, hidden_size=64, mlp_ratio=3,
        num_heads=2, depth=1, depth_single_blocks=2, axes_dim=[8, 8, 8, 8], theta=2000, patch_size=1, qkv_bias=False,
        guidance_embed=guidance, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        default_ref_method="index", ref_index_scale=10, **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20), guidance=torch.full((rows,), 4.0))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text, guidance=cond.extra.get("guidance"), transformer_options={})


def conditioning(cond):
    return [[cond.text, {"guidance": 4.0}]]
