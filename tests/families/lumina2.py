"""Lumina 2, tiny, in both libraries."""

from diffusers import Lumina2Transformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "Lumina2"
SIZE = (8, 12)
EPS = 1.1920928955078125e-07


def diffusers(seed=0):
    config = {
        "hidden_size": 96,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "multiple_of": 16,
        "axes_dim_rope": (8, 8, 8),
        "cap_feat_dim": 20,
    }
    return models.seeded(Lumina2Transformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        dim=96, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=2, cap_feat_dim=20, axes_dims=[8, 8, 8],
        axes_lens=[300, 512, 512], multiple_of=16, ffn_dim_multiplier=4.0, norm_eps=1e-5, qk_norm=True,
        rope_theta=10000, in_channels=16, **ops,
    )  # fmt: skip


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text, num_tokens=cond.text.shape[1], transformer_options={})
