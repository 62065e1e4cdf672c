"""A layout is chosen by class; what only looks alike is refused, at every door."""

import pytest
import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    DDIMScheduler,
    HunyuanVideoTransformer3DModel,
    UNet2DModel,
)
from vitrine.engine.activations.tap_during_sampling import tap_steps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models


def aura_flow():
    config = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pos_embed_max_size": 16,
    }
    return AuraFlowTransformer2DModel(**config)


def hunyuan_video():
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 6, 6),
    }
    return HunyuanVideoTransformer3DModel(**config)


def unconditional():
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(sample_size=16, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, **kinds)


def kandinsky():
    kinds = {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    }
    return models.unet(**kinds)


def fused():
    unet = models.unet(**models.ATTENTION_LAST)
    unet.fuse_qkv_projections()
    return unet


OTHERS = [aura_flow, hunyuan_video, unconditional, kandinsky, fused]


@pytest.mark.parametrize("make", OTHERS)
def test_look_alikes_are_refused_at_every_door(make, no_hooks_left):
    network = make()
    no_hooks_left(network)
    with pytest.raises(VitrineError, match="backbone: given"):
        sites_of(network)
    with pytest.raises(VitrineError, match="backbone: given"):
        capture(network, "*")
    with pytest.raises(VitrineError, match="backbone: given"), tap_steps(network, "*", [0]):
        pass


@pytest.mark.parametrize("make", OTHERS)
def test_and_by_the_denoiser(make):
    with pytest.raises(VitrineError, match="backbone: given"):
        Denoiser.from_diffusers(make(), DDIMScheduler())


def test_subclasses_are_of_the_family():
    unet = models.unet(**models.ATTENTION_LAST)

    class Mine(type(unet)):
        pass

    unet.__class__ = Mine
    assert sites_of(unet) and Denoiser.from_diffusers(unet, DDIMScheduler())


def test_inpainting_is_refused_before_the_forward():
    denoiser = Denoiser.from_diffusers(models.unet(in_channels=9), DDIMScheduler())
    with pytest.raises(VitrineError, match="9 for this UNet"):
        denoiser.forward(torch.randn(1, 4, 16, 16), 50.0, Condition(torch.randn(1, 5, models.TEXT)))


def test_an_ip_adapter_is_refused_before_the_forward():
    unet = models.unet()
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")  # what load_ip_adapter() writes
    with pytest.raises(VitrineError, match="unload_ip_adapter"):
        Denoiser.from_diffusers(unet, DDIMScheduler()).forward(
            torch.randn(1, 4, 16, 16), 50.0, Condition(torch.randn(1, 5, models.TEXT))
        )
