"""Wan, tiny, in both libraries, with three frames."""

from diffusers import WanTransformer3DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "WAN21_T2V"
SIZE = (3, 4, 6)
TIME = 20.0  # the libraries' sinusoids round differently: at 300 that alone is 4e-6


def diffusers(seed=0):
    config = {"num_attention_heads": 2, "attention_head_dim": 24, "text_dim": 20, "ffn_dim": 96, "num_layers": 2}
    return models.seeded(WanTransformer3DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        model_type="t2v", dim=48, ffn_dim=96, text_dim=20, num_heads=2, num_layers=2, in_dim=16, out_dim=16, **ops
    )


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20))


def run(net, x, t, cond):
    return net(x, t, cond.text, transformer_options={})
