"""Krea 2, tiny, in both libraries."""

from diffusers import Krea2Transformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "Krea2"
SIZE = (8, 12)


def diffusers(seed=0):
    config = {
        "in_channels": 64,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "text_hidden_dim": 32,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 128,
        "axes_dims_rope": (4, 6, 6),
    }
    return models.seeded(Krea2Transformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=64, tdim=256, txtdim=32, heads=4, kvheads=2, multiplier=4, layers=2, patch=2, channels=16, theta=1e3,
        txtlayers=3, txtheads=2, txtkvheads=2, **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 3, 32))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text.flatten(2), transformer_options={})


def conditioning(cond):
    return [[cond.text.flatten(2), {}]]
