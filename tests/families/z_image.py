"""Z-Image, tiny, in both libraries."""

from diffusers import ZImageTransformer2DModel
from vitrine_tests import models
from vitrine_tests.families.twin import condition, text_states

MODEL = "ZImage"
SIZE = (8, 12)
EPS = 1.1920928955078125e-07


def diffusers(seed=0):
    config = {
        "dim": 256,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 8,
        "n_kv_heads": 8,
        "cap_feat_dim": 20,
        "axes_dims": [8, 12, 12],
        "axes_lens": [256, 64, 64],
    }
    return models.seeded(ZImageTransformer2DModel, config, seed)


def comfyui(ops):
    from comfy.ldm.lumina.model import NextDiT
    from comfy.ldm.modules.diffusionmodules.mmdit import TimestepEmbedder

    net = NextDiT(
        dim=256, n_layers=2, n_refiner_layers=1, n_heads=8, n_kv_heads=8, cap_feat_dim=20, axes_dims=[8, 12, 12],
        axes_lens=[256, 64, 64], multiple_of=1, ffn_dim_multiplier=8 / 3, norm_eps=1e-5, qk_norm=True, rope_theta=256,
        z_image_modulation=True, time_scale=1000, pad_tokens_multiple=32, in_channels=16, **ops,
    )  # fmt: skip
    # As at full size: from width 1024 on, ComfyUI's time embedding has diffusers' hidden width.
    net.t_embedder = TimestepEmbedder(1024, output_size=256, **ops)
    return net


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20))


def run(net, x, t, cond):
    return net(x, t / 1000, cond.text, num_tokens=cond.text.shape[1], transformer_options={})
