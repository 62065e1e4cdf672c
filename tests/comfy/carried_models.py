"""Tiny models of random weights for what a conditioning can carry: ControlNet, GLIGEN, inpainting, unCLIP."""

import torch

CPU = torch.device("cpu")
CONTEXT = 24


def filled(module, seed=0):
    """The module with weights of usual size: core's layers come with none."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=draw) * (p[0].numel() ** -0.5))
            else:
                p.copy_(1 + 0.1 * torch.randn(p.shape, generator=draw))
    return module.eval().requires_grad_(False)


def unet_config(**more):
    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "channel_mult": (1, 2),
        "num_res_blocks": [1, 1], "use_spatial_transformer": True, "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1], "transformer_depth_middle": 1, "context_dim": CONTEXT,
        "legacy": False, "use_linear_in_transformer": False, "adm_in_channels": None,
        "use_temporal_attention": False, "use_temporal_resblock": False, "num_heads": 2,
    }  # fmt: skip
    return config | more


def patcher(model):
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(model, load_device=CPU, offload_device=CPU)


def sd(dtype=torch.float32, **more):
    """MODEL of SD 1.x's class; with weights of another dtype it computes in float32."""
    from comfy import supported_models

    class Tiny(supported_models.SD15):
        unet_extra_config = {"num_heads": 2, "num_head_channels": -1}

    described = Tiny(unet_config(**more))
    described.set_inference_dtype(dtype, None if dtype == torch.float32 else torch.float32)
    model = described.get_model({}, "", device=CPU)
    filled(model.diffusion_model)
    return patcher(model)


def unclip():
    """MODEL that reads pictures as unCLIP does."""
    from comfy import supported_models

    class Tiny(supported_models.SD21UnclipL):
        unet_extra_config = {"num_heads": 2, "num_head_channels": -1}
        noise_aug_config = {
            "noise_schedule_config": {"timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"},
            "timestep_dim": 8,
        }

    described = Tiny(unet_config(num_classes="sequential", adm_in_channels=16))
    described.set_inference_dtype(torch.float32, None)
    model = described.get_model({}, "", device=CPU)
    filled(model.diffusion_model)
    return patcher(model)


def control(**more):
    """A ControlNet for :func:`sd`, with a hint of three channels."""
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return control_of(unet_config()).set_cond_hint(hint, **({"strength": 1.0} | more))


def control_of(config):
    """A ControlNet without a hint for a UNet of core's, by its configuration."""
    import comfy.ops
    from comfy.cldm.cldm import ControlNet as Network
    from comfy.controlnet import ControlNet

    config = {k: v for k, v in config.items() if k not in ("out_channels", "transformer_depth_output", "dtype")}
    net = Network(**config, hint_channels=3, operations=comfy.ops.manual_cast, dtype=torch.float32, device=CPU)
    return ControlNet(filled(net, 5), load_device=CPU)


def gligen(network):
    """A grounding model for :func:`sd`: one box in the middle of the picture, as core's conditioning key."""
    from comfy.gligen import GatedSelfAttentionDense, Gligen, PositionNet
    from comfy.ldm.modules.attention import BasicTransformerBlock

    blocks = [m for m in network.modules() if isinstance(m, BasicTransformerBlock)]
    widths = [m.attn1.to_q.in_features for m in blocks]
    fusers = [GatedSelfAttentionDense(width, CONTEXT, 2, width // 2) for width in widths]
    model = Gligen(fusers, PositionNet(CONTEXT, CONTEXT), CONTEXT)
    filled(model, 6)
    words = torch.randn(1, CONTEXT, generator=torch.Generator().manual_seed(7))
    return "position", patcher(model), [(words, 4, 4, 2, 2)]
