"""Flux.1, tiny, in both libraries: the shape of the shipped flow model, without its guidance."""

from diffusers import FluxTransformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "FluxSchnell"
CONFIG_KEYS = {"out_channels": 16}
SIZE = (8, 12)
EPS = 1.1920928955078125e-07


def diffusers(seed=0):
    config = {
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 24,
        "axes_dims_rope": (4, 6, 6),
        "guidance_embeds": False,
    }
    return models.seeded(FluxTransformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=24, context_in_dim=20, hidden_size=32, theta=10000, mlp_ratio=4.0,
        num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[4, 6, 6], patch_size=2, qkv_bias=True,
        guidance_embed=False, txt_ids_dims=[], **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20), text_states(g, rows, 24))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text, y=cond.pooled, transformer_options={})


def conditioning(cond):
    return [[cond.text, {"pooled_output": cond.pooled}]]
