"""Networks of every family's real classes with every optional module, on the meta device, and their modules' names."""

import torch
from torch import nn
from vitrine_tests import models
from vitrine_tests.families.twin import twin

TWINS = {
    "Anima": ("anima",), "Chroma": ("chroma",), "Flux": ("flux",), "Flux.2": ("flux2", "klein"),
    "HiDream": ("hidream",), "Krea 2": ("krea2",), "Lumina 2": ("lumina2",), "PixArt": (),
    "Qwen-Image": ("qwen_image",), "SD3": ("sd35",), "UNet": (), "Wan": ("wan",), "Z-Image": ("z_image",),
}  # fmt: skip


def _unets():
    refiner = {
        "cross_attention_dim": 1280,
        "attention_head_dim": (6, 12, 24, 24),
        "use_linear_projection": True,
        "block_out_channels": (384, 768, 1536, 1536),
        "transformer_layers_per_block": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2560,
    }
    return [models.outline(**config) for config in (models.SD15, models.SDXL, refiner)]


def diffusers_networks(family):
    """Of diffusers' class."""
    if family == "UNet":
        return _unets()
    more = {
        "PixArt": lambda: models.pixart(use_additional_conditions=True),
        "Flux": lambda: models.flux(guidance_embeds=True),
        "SD3": lambda: models.sd3(dual_attention_layers=(0,), qk_norm="rms_norm"),
        "Wan": _wan_of_pictures,
    }
    return [twin(name).diffusers() for name in TWINS[family]] + ([more[family]()] if family in more else [])


def _wan_of_pictures():
    from diffusers import WanTransformer3DModel

    config = {"num_attention_heads": 2, "attention_head_dim": 24, "text_dim": 20, "ffn_dim": 96, "num_layers": 2}
    return WanTransformer3DModel(**config, image_dim=32, added_kv_proj_dim=48, pos_embed_seq_len=6)


def comfyui_networks(family):
    """Of ComfyUI's class."""
    import comfy.ops

    ops = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32}
    if family == "UNet":
        return [_comfyui_unet(net, ops) for net in _unets()]
    return [twin(name).comfyui(ops) for name in TWINS[family]] + _comfyui_more(family, ops)


def _comfyui_unet(net, ops):
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.model_detection import unet_config_from_diffusers_unet

    config = unet_config_from_diffusers_unet(net.state_dict(), torch.float32)
    return UNetModel(**config, device="meta", operations=ops["operations"])


def _comfyui_more(family, ops):
    if family == "PixArt":
        from comfy.ldm.pixart.pixartms import PixArtMS

        return [PixArtMS(hidden_size=32, depth=2, num_heads=2, micro_condition=True, **ops)]
    if family == "Flux":
        from comfy.ldm.flux.model import Flux

        return [Flux(
            in_channels=16, out_channels=16, vec_in_dim=24, context_in_dim=20, hidden_size=32, theta=10000,
            mlp_ratio=4.0, num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[4, 6, 6], patch_size=2,
            qkv_bias=True, guidance_embed=True, txt_ids_dims=[], **ops,
        )]  # fmt: skip
    if family == "Wan":
        from comfy.ldm.wan.model import WanModel

        return [WanModel(
            model_type="i2v", dim=48, ffn_dim=96, text_dim=20, num_heads=2, num_layers=2, in_dim=36, out_dim=16,
            flf_pos_embed_token_number=6, **ops,
        )]  # fmt: skip
    return []


def weighted(net):
    """Paths of the modules that have a weight of two or more axes, which adapters change."""
    return [
        path
        for path, module in net.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.ndim > 1
    ]


def templates(net):
    """Their paths with ``*`` for the number of an entry of a ModuleList."""
    kinds = dict(net.named_modules())
    shown = set()
    for path in weighted(net):
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and isinstance(kinds[".".join(path.split(".")[:i])], nn.ModuleList):
                parts[i] = "*"
        shown.add(".".join(parts))
    return shown
