"""What stands on a pipeline, listed: each kind of change is seen, and none is seen where there is none."""

import pytest
import torch
from diffusers import HunyuanDiT2DModel
from peft import LoraConfig
from torch import nn
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.patches import active_patches, as_text
from vitrine.engine.portraits import load_portraits
from vitrine.engine.tracing.hooks import edit
from vitrine_tests import models


@pytest.fixture
def pipe():
    return load_portraits().pipeline()


def kinds(model):
    return {(p.kind, p.where.split(" at ")[0]) for p in active_patches(model)}


def test_an_untouched_pipeline_has_none(pipe):
    assert active_patches(pipe) == [] and active_patches(pipe.unet) == []
    assert as_text(active_patches(pipe)).startswith("nothing")


def test_adapters_with_their_scale_until_they_are_switched_off(pipe):
    unet = pipe.unet
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "style")
    unet.set_adapters(["style"], [0.5])
    (found,) = active_patches(pipe)
    layers = sum(name.endswith("to_q") for name, _ in unet.named_modules())
    assert (found.kind, found.where, found.count) == ("adapter", "unet: style at scale 0.5", layers)
    unet.disable_adapters()
    assert active_patches(pipe) == []
    unet.enable_adapters()
    unet.fuse_lora()
    assert {p.where for p in active_patches(pipe)} == {"unet: style merged into the weights"}


def test_our_own_edit_is_listed_while_it_stands(pipe):
    with edit(pipe.unet, {"mid-vit-out": lambda tensor: tensor}):
        assert {p.owner for p in active_patches(pipe)} == {
            "vitrine.engine.runtime.forward_hooks",  # which counts the forwards that end
            "vitrine.engine.tracing.hooks",
            "vitrine.engine.tracing.reading",
        }
    assert active_patches(pipe) == []


def test_what_others_do_to_the_network(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.1, b2=1.2)
    pipe.unet.mid_block.forward = lambda *args, **told: None
    nn.utils.parametrizations.weight_norm(pipe.unet.conv_in)

    class Custom:
        def __call__(self, *args, **told): ...

    pipe.unet.set_attn_processor(Custom())
    text = as_text(active_patches(pipe))
    for word in ("FreeU: unet: s1 0.9", "replaced forward", "parametrization: unet: weight", "attention processor"):
        assert word in text, (word, text)
    assert f"[{__name__}]" in text


@pytest.mark.parametrize("place", ["transformer_2d", "hunyuan"])
def test_other_families_have_none_as_they_come(place):
    made = {
        "transformer_2d": lambda: models.pixart(),
        "hunyuan": lambda: HunyuanDiT2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            patch_size=2,
            num_layers=2,
            sample_size=8,
            hidden_size=32,
            cross_attention_dim=16,
            cross_attention_dim_t5=8,
            pooled_projection_dim=8,
            text_len=4,
            text_len_t5=4,
        ),
    }[place]()
    assert active_patches(made) == []


def test_pag_of_diffusers_is_listed(pipe):
    from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0

    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(PAGCFGIdentitySelfAttnProcessor2_0())
    assert kinds(pipe) == {("attention processor", "unet: PAGCFGIdentitySelfAttnProcessor2_0")}


def test_neither_a_pipeline_nor_a_module():
    with pytest.raises(VitrineError, match="pipeline"):
        active_patches(torch.zeros(1))
