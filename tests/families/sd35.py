"""SD3.5 medium, tiny, in both libraries: a second self-attention in its first block."""

from diffusers import SD3Transformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "SD3"
SIZE = (8, 12)


def diffusers(seed=0):
    config = {
        "num_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 1,
        "joint_attention_dim": 20,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 24,
        "pos_embed_max_size": 12,
        "sample_size": 24,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    return models.seeded(SD3Transformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    embed = {"target": "torch.nn.Linear", "params": {"in_features": 20, "out_features": 64}}
    return OpenAISignatureMMDITWrapper(
        input_size=None,
        depth=1,
        num_blocks=2,
        in_channels=16,
        adm_in_channels=24,
        context_embedder_config=embed,
        num_patches=144,
        pos_embed_max_size=12,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
        **ops,
    )


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20), text_states(g, rows, 24))


def run(net, x, t, cond):
    return net(x, t, context=cond.text, y=cond.pooled, transformer_options={})


def conditioning(cond):
    return [[cond.text, {"pooled_output": cond.pooled}]]
