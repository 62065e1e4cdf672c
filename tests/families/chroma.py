"""Chroma, tiny, in both libraries; its 19 + 38 blocks are fixed by the 344 rows of its modulation."""

import torch
from diffusers import ChromaTransformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "Chroma"
CONFIG_KEYS = {"out_channels": 64}
SIZE = (4, 6)
ROUNDING = 2
EPS = 1.1920928955078125e-07


def diffusers(seed=0):
    config = {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "axes_dims_rope": (4, 6, 6),
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 40,
        "approximator_layers": 2,
    }
    return models.seeded(ChromaTransformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.chroma.model import Chroma

    return Chroma(
        in_channels=64, out_channels=64, context_in_dim=20, hidden_size=32, mlp_ratio=4.0, num_heads=2, depth=19,
        depth_single_blocks=38, axes_dim=[4, 6, 6], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=32,
        hidden_dim=40, n_layers=2, txt_ids_dims=[], vec_in_dim=None, **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 5, 20))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text, guidance=torch.zeros(len(x)), transformer_options={})
