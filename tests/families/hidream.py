"""HiDream, tiny, in both libraries; square, because diffusers fills other shapes."""

from diffusers import HiDreamImageTransformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "HiDream"
SIZE = (8, 8)
EXPERTS = True
CONFIG = {
    "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 16, "num_attention_heads": 2, "caption_channels": [20, 24], "text_emb_dim": 28,
    "num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": (8, 4, 4), "max_resolution": (16, 16),
    "llama_layers": [0, 1],
}  # fmt: skip


def diffusers(seed=0):
    return models.seeded(HiDreamImageTransformer2DModel, CONFIG, seed)


def comfyui(ops):
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel as Theirs

    return Theirs(**CONFIG, **ops)


def prompt(g, rows=2):
    llama = text_states(g, rows, 2, 5, 24)
    return condition(text_states(g, rows, 7, 20), text_states(g, rows, 28), encoder_hidden_states_llama3=llama)


def run(net, x, t, cond):
    llama = cond.extra["encoder_hidden_states_llama3"]
    return net(x, t, cond.pooled, cond.text, encoder_hidden_states_llama3=llama, transformer_options={})


def conditioning(cond):
    llama = cond.extra["encoder_hidden_states_llama3"]
    return [[cond.text, {"pooled_output": cond.pooled, "conditioning_llama3": llama}]]
