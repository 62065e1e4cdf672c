"""The dtype of a network's inputs: what diffusers' ``model.dtype`` says, wherever its weights and hooks are."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from vitrine.engine.runtime.placement import dtype_of
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
