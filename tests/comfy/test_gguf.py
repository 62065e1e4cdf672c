"""Models as ComfyUI-GGUF loads them, by a stand-in in its layout: what the float32 checkpoint gives, or refused."""

import sys
from types import ModuleType

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.stored_weights import as_numbers, bits_of
from vitrine.engine.tracing.fingerprint import same_weights, short
from vitrine.engine.w2w import InvertConfig, Manifest, WeightSpace, initial_lora, invert
from vitrine_tests import models
from vitrine_tests.comfy.test_odd_inputs import basic

WIDE = 64
KINDS = {"Q8_0": 8, "Q4_0": 4}


@pytest.fixture(scope="module")
def ggml(comfy) -> ModuleType:
    from vitrine_tests.comfy import ggml_model

    return ggml_model


@pytest.fixture(params=KINDS)
def case(request, ggml):
    with torch.inference_mode():
        return KINDS[request.param], *ggml.sd(ggml.Stored[request.param], context_dim=WIDE)


@pytest.fixture(scope="module")
def bridge(comfy) -> ModuleType:
    from vitrine.nodes.comfy import model

    return model


def text():
    return [[torch.randn(1, 7, WIDE, generator=torch.Generator().manual_seed(0)), {}]]


def site_of(model):
    return value_sites(model.model.diffusion_model, "all")[0]


def with_lora(model, strength=1.0):
    """A clone with a LoRA on the values that read text, which this kind of model keeps on the tensor."""
    key = f"diffusion_model.{site_of(model).path}.weight"
    clone, g = model.clone(), torch.Generator().manual_seed(3)
    clone.add_patches({key: (torch.randn(site_width(model), WIDE, generator=g) * 0.2,)}, strength)
    return clone


def site_width(model):
    return model.model.diffusion_model.get_submodule(site_of(model).path).out_features


def near(found, expected, bits):
    return float((found - expected).std() / expected.std()) < (0.03 if bits == 8 else 0.4)


def test_weights_are_the_numbers_they_mean(bridge, case):
    bits, whole, model = case
    weight, plain = (m.model.diffusion_model.get_submodule(site_of(m).path).weight for m in (model, whole))
    assert tuple(weight.size()) != tuple(plain.shape) == tuple(weight.shape) and bits_of(weight) == bits
    numbers = as_numbers(weight)
    assert type(numbers) is torch.Tensor and numbers.shape == plain.shape and near(numbers, plain, bits)
    first, second = bridge.fingerprint(whole), bridge.fingerprint(model)
    assert f"in {bits} bits" in short(second) and same_weights(first, second) == (bits == 8)
    patched = with_lora(model)
    basic(patched, text())  # the LoRA is on the tensor now
    assert bridge.fingerprint(patched) == bridge.fingerprint(model) == second
    assert bridge.active_fingerprint(patched) != second


def test_neurons_are_tapped_blocked_and_baked(comfy, bridge, case):
    bits, whole, model = case
    before, neurons = basic(model, text()), NeuronSet({site_of(whole).address: (0, 3, 5)}, bridge.fingerprint(model))
    assert near(before, basic(whole, text()), bits)
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    for start in (model, with_lora(model)):
        blocked = basic(comfy.call("VitrineNEMONeuronBlocker", model=start, neurons=neurons, **told)[0], text())
        baked = basic(comfy.call("VitrineNEMOBake", model=start, neurons=neurons, factor=0.0)[0], text())
        if start is model:
            assert torch.allclose(baked, blocked, atol=1e-3 * float(before.std()))
        assert float((blocked - basic(start, text())).abs().max()) > 0.02 * float(before.std())
    assert torch.equal(basic(model, text()), before), "nothing leaked"
    watched, recorder = comfy.call(
        "VitrineTapDuringSampling", model=model, layers=site_of(model).address, record_steps="0"
    )
    assert torch.equal(basic(watched, text()), before)
    assert torch.isfinite(recorder.record[0]["cond"][site_of(model).address].tensor).all()


@pytest.mark.parametrize("gradients", [False, True], ids=["as the pack is", "with gradients"])
def test_models_are_inverted_or_refused(bridge, ggml, case, monkeypatch, gradients):
    bits, whole, model = case
    if gradients:
        monkeypatch.setattr(ggml.Ops, "plain", lambda weight: weight.as_subclass(torch.Tensor))
    g = torch.Generator().manual_seed(2)
    net = models.unet(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=WIDE,
        attention_head_dim=2,
        norm_num_groups=32,
        **models.ATTENTION_LAST,
    )
    manifest = Manifest.of(initial_lora(net, ("attn2.to_q", "attn2.to_v"), rank=1, alpha=1.0))
    rows, _ = torch.linalg.qr(torch.randn(manifest.size, 2, generator=g))
    one = torch.ones(manifest.size)
    space = WeightSpace(manifest, one * 0.1, one, rows.T.contiguous(), torch.ones(2), torch.randn(4, 2), 4)
    x = torch.randn(1, 4, 8, 8, generator=g)

    def loss(each):
        with torch.inference_mode(False), bridge.differentiable():
            told = Condition(text()[0][0].clone()), InvertConfig(steps=3, check_every=3)
            return invert(bridge.denoiser_of(each), space, x, *told).losses[-1][1][0]

    if not gradients:
        with pytest.raises(VitrineError, match="GGMLTensor in .*, through which no gradient passes"):
            loss(model)
        return
    assert loss(model) == pytest.approx(loss(whole), rel=0.05 if bits == 8 else 0.5)


def test_a_pack_without_the_function_is_refused(ggml, case, monkeypatch):
    _, _, model = case
    weight = model.model.diffusion_model.get_submodule(site_of(model).path).weight
    monkeypatch.delattr(sys.modules[type(weight).__module__], "dequantize_tensor")
    with pytest.raises(VitrineError, match="stored as GGMLTensor"):
        as_numbers(weight)
