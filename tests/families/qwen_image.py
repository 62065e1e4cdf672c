"""Qwen-Image, tiny, in both libraries."""

from diffusers import QwenImageTransformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "QwenImage"
SIZE = (8, 12)  # even grids: on odd ones the libraries centre positions differently
CONFIG = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "axes_dims_rope": (4, 6, 6),
}


def diffusers(seed=0):
    return models.seeded(QwenImageTransformer2DModel, CONFIG, seed)


def comfyui(ops):
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel as Theirs

    return Theirs(**CONFIG, **ops)


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20))


def run(net, x, t, cond):
    return net(x[:, :, None], t / 1000, cond.text, transformer_options={})[:, :, 0]
