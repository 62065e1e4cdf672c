"""A layout is chosen by class; what only looks alike is refused, at every door."""

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    DDIMScheduler,
    Flux2Transformer2DModel,
    UNet2DModel,
)
from vitrine.engine.activations.during import tap_steps
from vitrine.engine.addresses import sites_of
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.hooks import capture
from vitrine_tests import models


def flux_2():
    config = {
        "patch_size": 1, "in_channels": 128, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32,
        "num_attention_heads": 2, "joint_attention_dim": 20, "axes_dims_rope": (8, 8, 8, 8),
    }  # fmt: skip
    return Flux2Transformer2DModel(**config)


def chroma():
    config = {
        "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6), "approximator_hidden_dim": 16, "approximator_layers": 1,
        "approximator_num_channels": 64,
    }  # fmt: skip
    return ChromaTransformer2DModel(**config)


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


@pytest.mark.parametrize("make", [flux_2, chroma, unconditional, kandinsky, fused])
def test_look_alikes_are_refused_at_every_door(make, no_hooks_left):
    network = make()
    no_hooks_left(network)
    with pytest.raises(VitrineError, match="backbone: given"):
        sites_of(network)
    with pytest.raises(VitrineError, match="backbone: given"):
        capture(network, "*")
    with pytest.raises(VitrineError, match="backbone: given"), tap_steps(network, "*", [0]):
        pass


@pytest.mark.parametrize("make", [flux_2, chroma, unconditional])
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
