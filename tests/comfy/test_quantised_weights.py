"""A checkpoint of 8-bit weights, plain and scaled, as core loads it: what the float32 one gives, or a plain refusal."""

import json
from types import ModuleType

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.stored_weights import as_numbers
from vitrine.engine.tracing.fingerprint import same_weights, short
from vitrine.engine.w2w import InvertConfig, Manifest, WeightSpace, initial_lora, invert
from vitrine.engine.w2w.train.batched_lora import BatchedLora
from vitrine_tests.comfy import carried_models as tiny
from vitrine_tests.comfy.test_odd_inputs import basic

FP8 = torch.float8_e4m3fn


def plain():
    return tiny.sd(FP8)


def scaled():
    """As a file with ``comfy_quant`` beside each linear weight is loaded: each has a scale, and is no plain tensor."""
    from comfy import supported_models

    class Tiny(supported_models.SD15):
        unet_extra_config = {"num_heads": 2, "num_head_channels": -1}

    described = Tiny(tiny.unet_config())
    described.set_inference_dtype(torch.float32, torch.float32)
    described.quant_config = {"mixed_ops": True}
    model, weights = described.get_model({}, "", device=tiny.CPU), tiny.sd().model.diffusion_model.state_dict()
    for name, weight in list(weights.items()):
        if weight.ndim == 2 and "transformer_blocks" in name:
            scale = weight.abs().max() / torch.finfo(FP8).max
            layer = name.removesuffix(".weight")
            told = json.dumps({"format": "float8_e4m3fn"}).encode()
            weights |= {
                name: (weight / scale).to(FP8),
                f"{layer}.weight_scale": scale,
                f"{layer}.comfy_quant": torch.tensor(list(told), dtype=torch.uint8),
            }
    missing, unexpected = model.diffusion_model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    return tiny.patcher(model)


WAYS = {"plain": plain, "scaled": scaled}


@pytest.fixture(params=WAYS)
def case(request, comfy):
    with torch.inference_mode():
        return request.param, tiny.sd(), WAYS[request.param]()


@pytest.fixture(scope="module")
def bridge(comfy) -> ModuleType:
    from vitrine.nodes.comfy import model

    return model


def test_one_checkpoint_has_one_fingerprint(bridge, case):
    way, whole, model = case
    network = model.model.diffusion_model
    weight = network.get_submodule(value_sites(network, "all")[0].path).weight
    assert (type(weight).__name__ == "QuantizedTensor") == (way == "scaled") or weight.dtype == FP8
    first, second = bridge.fingerprint(whole), bridge.fingerprint(model)
    assert same_weights(first, second) and same_weights(second, first) and short(second).endswith("in 8 bits")
    other = tiny.sd()
    tiny.filled(other.model.diffusion_model, 1)
    assert not same_weights(bridge.fingerprint(other), second)


def test_baking_is_blocking(comfy, case):
    _, whole, model = case
    text = [[torch.randn(1, 7, tiny.CONTEXT, generator=torch.Generator().manual_seed(0)), {}]]
    site = value_sites(whole.model.diffusion_model, "all")[0]
    neurons = NeuronSet({site.address: (0, 3, 5)}, comfy_fingerprint(whole))
    before = basic(model, text)
    baked = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)[0]
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    blocked = comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **told)[0]
    wanted = basic(blocked, text)
    torch.testing.assert_close(basic(baked, text), wanted, atol=2e-2 * float(wanted.std()), rtol=0)
    assert float((wanted - before).abs().max()) > 0.02 * float(before.std())
    torch.testing.assert_close(basic(model, text), before, atol=0, rtol=0, msg="the bake leaked")


def comfy_fingerprint(model):
    from vitrine.nodes.comfy.model import fingerprint

    return fingerprint(model)


def test_models_of_a_space_are_drawn_and_inverted(bridge, case):
    _, whole, model = case
    network, g = model.model.diffusion_model, torch.Generator().manual_seed(2)
    manifest = Manifest.of(initial_lora(tiny_diffusers(), ("attn2.to_q", "attn2.to_v"), rank=1, alpha=1.0))
    rows, _ = torch.linalg.qr(torch.randn(manifest.size, 2, generator=g))
    one = torch.ones(manifest.size)
    space = WeightSpace(manifest, one * 0.1, one, rows.T.contiguous(), torch.ones(2), torch.randn(4, 2), 4)
    text = [[torch.randn(1, 7, tiny.CONTEXT, generator=g), {}]]
    changes = []
    for each in (model, whole):
        before = basic(each, text)
        with BatchedLora(each.model.diffusion_model, manifest, space.mean[None]):
            changes.append(basic(each, text) - before)
    assert (changes[0] - changes[1]).square().mean() < 0.05 * changes[1].square().mean()
    config, x = InvertConfig(steps=3, check_every=3), torch.randn(1, 4, 8, 8, generator=g)
    losses = []
    for each in (model, whole):
        with torch.inference_mode(False), bridge.differentiable():
            found = invert(bridge.denoiser_of(each), space, x, Condition(text[0][0].clone()), config)
        losses.append(found.losses[-1][1][0])
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and network is model.model.diffusion_model


def tiny_diffusers():
    from vitrine_tests import models

    return models.unet(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=tiny.CONTEXT,
        attention_head_dim=2,
        norm_num_groups=32,
        **models.ATTENTION_LAST,
    )


# --- core's other formats -----------------------------------------------------------------------------------------
FORMATS = {"float8_e5m2": 8, "mxfp8": 8, "int8_tensorwise": 8, "nvfp4": 4, "convrot_w4a4": 4, "asym_w4a8_int8": 4}
"""Name of core's -> bits of a weight."""
WIDE = 256  # what all of them take whole groups of


def stored_as(form):
    """(float32 MODEL, the same with the layers that read text stored in one of core's formats)."""
    from comfy import supported_models
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    class Tiny(supported_models.SD15):
        unet_extra_config = {"num_heads": 2, "num_head_channels": -1}

    described = Tiny(tiny.unet_config(context_dim=WIDE))
    described.set_inference_dtype(torch.float32, torch.float32)
    described.quant_config = {"mixed_ops": True}
    whole, model = tiny.sd(context_dim=WIDE), described.get_model({}, "", device=tiny.CPU)
    weights, told = whole.model.diffusion_model.state_dict(), json.dumps({"format": form}).encode()
    for name, weight in list(weights.items()):
        if weight.ndim == 2 and "transformer_blocks" in name and weight.shape[1] == WIDE:
            weights |= QuantizedTensor.from_float(weight, QUANT_ALGOS[form]["comfy_tensor_layout"]).state_dict(name)
            weights[f"{name.removesuffix('.weight')}.comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
    missing, unexpected = model.diffusion_model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    return whole, tiny.patcher(model)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMATS)
def test_formats_of_core(comfy, bridge, form):
    from comfy.quant_ops import QUANT_ALGOS

    if form not in QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {form}")
    with torch.inference_mode():
        whole, model = stored_as(form)
    network, plain = model.model.diffusion_model, whole.model.diffusion_model
    site = value_sites(plain, "all")[0]
    weight = as_numbers(network.get_submodule(site.path).weight)
    away = (weight - plain.get_submodule(site.path).weight).std() / weight.std()
    assert away < (0.2 if FORMATS[form] == 4 else 0.08)
    mark = bridge.fingerprint(model)
    assert f"in {FORMATS[form]} bits" in short(mark)
    assert same_weights(mark, bridge.fingerprint(whole)) == (FORMATS[form] == 8)
    text = [[torch.randn(1, 7, WIDE, generator=torch.Generator().manual_seed(0)), {}]]
    before, neurons = basic(model, text), NeuronSet({site.address: (0, 3, 5)}, mark)
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    baked = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)[0]
    blocked = basic(comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **told)[0], text)
    moved = (blocked - before).std()
    assert moved > 0.005 * before.std() and (basic(baked, text) - blocked).std() < 0.6 * moved, "core rounds anew"
    assert torch.equal(basic(model, text), before)
    shape = {"samples": torch.zeros(1, 4, 16, 16)}
    asked = {"positive": text, "negative": text, "latent": shape, "method": "one step", "seeds": 2}
    asked["timestep_index"] = 15
    assert 0 < comfy.call("VitrineNEMODetect", model=model, **asked)[1] < 1
    denoiser, x, found = bridge.denoiser_of(model), torch.randn(1, 4, 8, 8), None
    try:
        with torch.inference_mode(False), bridge.differentiable():
            x = x.requires_grad_()
            found = torch.autograd.grad(denoiser.forward(x, 300.0, Condition(text[0][0].clone())).sum(), x)[0]
    except VitrineError as error:
        assert "no gradient passes" in str(error)
    assert (found is None) == (form in ("convrot_w4a4", "asym_w4a8_int8"))
