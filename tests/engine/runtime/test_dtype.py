"""The dtype of a network's inputs: what diffusers' ``model.dtype`` says, wherever its weights and hooks are."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import FluxTransformer2DModel
from vitrine.engine.families import call_of
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime import placement
from vitrine.engine.runtime.placement import device_of, dtype_of, placement_of
from vitrine_tests import models

KINDS = [models.unet, models.dit, models.pixart, models.sd3, models.flux, models.vae]


@pytest.mark.parametrize("make", KINDS)
def test_it_is_the_models_own(make):
    net = make()
    assert dtype_of(net) == net.dtype == torch.float32
    net.to(torch.bfloat16)
    assert dtype_of(net) == dtype_of(torch.compile(net, backend="eager")) == net.dtype == torch.bfloat16


def test_layers_kept_in_float32_do_not_count(monkeypatch):
    net = models.flux()
    monkeypatch.setattr(FluxTransformer2DModel, "_keep_in_fp32_modules", ["time_text_embed"])
    net.to(torch.bfloat16)
    net.time_text_embed.to(torch.float32)
    assert next(net.parameters()).dtype == torch.float32
    assert dtype_of(net) == net.dtype == torch.bfloat16


def test_under_layerwise_casting_it_is_what_layers_compute_in():
    net = models.unet().to(torch.bfloat16)
    net.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    assert next(p for p in net.parameters()).dtype == torch.float8_e4m3fn
    assert dtype_of(net) == net.dtype == torch.bfloat16


@pytest.mark.parametrize("make", KINDS)
def test_one_walk_says_device_and_dtype(make):
    net = make().to(torch.bfloat16)
    compiled = torch.compile(net, backend="eager")
    assert placement_of(net) == placement_of(compiled) == (torch.device("cpu"), torch.bfloat16)
    net.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    assert placement_of(net) == (device_of(net), dtype_of(net)) == (torch.device("cpu"), torch.float32)


def test_a_hook_that_is_added_between_forwards_is_seen_on_an_inner_module():
    net = models.unet()
    assert placement_of(net) == (torch.device("cpu"), torch.float32)
    inner = net.mid_block.attentions[0].transformer_blocks[0].attn2.to_v
    add_hook_to_module(inner, AlignDevicesHook(execution_device="meta"))
    assert placement_of(net)[0] == torch.device("meta")


def test_modules_are_walked_through_once_before_a_forward(monkeypatch):
    net, walks = models.unet(), []
    walk = placement.replaces_forward_below
    monkeypatch.setattr(placement, "replaces_forward_below", lambda *args: walks.append(args) or walk(*args))
    monkeypatch.setattr(placement, "modules_in", lambda module: pytest.fail("a second walk"))
    monkeypatch.setattr(type(net), "modules", lambda module: pytest.fail("a second walk"))
    cond = Condition(torch.zeros(1, 7, net.config.cross_attention_dim))
    call_of(net)(torch.zeros(1, net.config.in_channels, 16, 16), torch.zeros(1), cond)
    assert len(walks) == 1
