"""Networks with weights of 8 or 4 bits, stored by the real libraries: each method works, or refuses them plainly."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import nn
from vitrine.engine.diffusion.denoiser import Denoiser, check_finite
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import spelled_layers
from vitrine.engine.jobs.digests import digest
from vitrine.engine.nemo import NeuronSet, bake, block, make_probe, score_prompts
from vitrine.engine.nemo.sites import value_sites
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.stored_weights import as_numbers, bits_of, is_packed
from vitrine.engine.tracing.fingerprint import fingerprint_of, same_weights, short
from vitrine.engine.tracing.hooks import capture
from vitrine.engine.w2w import InvertConfig, invert
from vitrine.engine.w2w.train.batched_lora import late_lora
from vitrine_tests import models
from vitrine_tests.pipelines.test_w2w_around import space_on

WIDTH = 64  # what bitsandbytes and GGUF take whole blocks of


def unet():
    return models.unet(cross_attention_dim=WIDTH, block_out_channels=(32, 64), attention_head_dim=8)


def flux():
    return models.flux(joint_attention_dim=WIDTH, attention_head_dim=32, axes_dims_rope=(8, 12, 12))


NETWORKS = {"unet": (unet, DDIMScheduler), "flux": (flux, FlowMatchEulerDiscreteScheduler)}


# --- the libraries' own ways ----------------------------------------------------------------------
def replaced(net, make):
    """Each linear layer whose inputs are whole blocks becomes what ``make`` gives."""
    for path, module in list(net.named_modules()):
        if type(module) is nn.Linear and module.in_features % WIDTH == 0:
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, make(module))
    return net


def layerwise(net):
    net.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return net


def torchao(config):
    def made(net):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(net, getattr(quantization, config)())
        return net

    return made


def gguf(kind):
    def made(net):
        library = pytest.importorskip("gguf")
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        quant_type = library.GGMLQuantizationType[kind]

        def layer(old):
            new = GGUFLinear(old.in_features, old.out_features, old.bias is not None, compute_dtype=torch.float32)
            packed = library.quants.quantize(old.weight.detach().numpy(), quant_type)
            new.weight, new.bias = GGUFParameter(torch.from_numpy(packed), quant_type=quant_type), old.bias
            return new

        return replaced(net, layer)

    return made


def bitsandbytes(kind):
    def made(net):
        library = pytest.importorskip("bitsandbytes")

        def layer(old):
            sides, weight = (old.in_features, old.out_features, old.bias is not None), old.weight.detach().clone()
            if kind == "nf4":
                new = library.nn.Linear4bit(*sides, compute_dtype=torch.float32, quant_type="nf4")
                new.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            else:
                new = library.nn.Linear8bitLt(*sides, has_fp16_weights=False)
                new.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            new.bias = old.bias
            return new.to("cpu")  # quantises

        return replaced(net, layer)

    return made


WAYS = {
    "layerwise": layerwise,
    "int8": torchao("Int8WeightOnlyConfig"),
    "float8": torchao("Float8WeightOnlyConfig"),
    "int8, inputs too": torchao("Int8DynamicActivationInt8WeightConfig"),
    "Q8_0": gguf("Q8_0"),
    "Q4_0": gguf("Q4_0"),
    "nf4": bitsandbytes("nf4"),
    "llm.int8": bitsandbytes("int8"),
}
FOUR = {"Q4_0", "nf4"}
CASES = [
    pytest.param(network, way, marks=[] if way == "layerwise" else pytest.mark.nightly)
    for network in NETWORKS
    for way in WAYS
]


class Case:
    def __init__(self, network, way):
        make, scheduler = NETWORKS[network]
        self.plain, self.way = make().requires_grad_(False), way
        self.net = WAYS[way](copy.deepcopy(self.plain)).requires_grad_(False)
        self.denoiser, self.reference = (Denoiser.from_diffusers(n, scheduler()) for n in (self.net, self.plain))
        g = torch.Generator().manual_seed(1)
        self.x, text = torch.randn(2, 4, 8, 8, generator=g), torch.randn(2, 5, WIDTH, generator=g)
        self.cond = Condition(text, torch.randn(2, models.POOLED, generator=g) if network == "flux" else None)
        self.site = next(s for s in value_sites(self.plain, "all") if not s.joint)

    def forward(self, denoiser=None):
        return (denoiser or self.denoiser).forward(self.x, 300.0, self.cond)


@pytest.mark.parametrize(("network", "way"), CASES)
@torch.no_grad()
def test_weights_are_read_as_the_numbers_they_mean(network, way):
    case = Case(network, way)
    bits = 4 if way in FOUR else 8
    layer, plain = (net.get_submodule(case.site.path) for net in (case.net, case.plain))
    for _ in range(2):  # bitsandbytes moves its scales at the first forward
        numbers = as_numbers(layer.weight, layer)
        assert numbers.dtype == torch.float32 and numbers.shape == plain.weight.shape and bits_of(layer.weight) == bits
        away = (numbers - plain.weight).square().mean().sqrt() / plain.weight.square().mean().sqrt()
        assert away < (0.2 if bits == 4 else 0.06)
        case.forward()
    check_finite(case.net)
    digest(case.net)
    assert {n: r for n, _, r in spelled_layers(case.net)} == {n: r for n, _, r in spelled_layers(case.plain)}


@pytest.mark.parametrize(("network", "way"), CASES)
@torch.no_grad()
def test_a_weight_that_is_no_number_is_found(network, way):
    if way not in ("layerwise", "float8"):
        pytest.skip("this storage has no NaN")
    case = Case(network, way)
    stored = case.net.get_submodule(case.site.path).weight
    (stored.qdata if way == "float8" else stored).view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(VitrineError, match="NaN or Inf in"):
        check_finite(case.net)


@pytest.mark.parametrize(("network", "way"), CASES)
@torch.no_grad()
def test_the_fingerprint_is_the_checkpoints_or_says_why_not(network, way):
    case = Case(network, way)
    stored, plain, half = (fingerprint_of(n) for n in (case.net, case.plain, copy.deepcopy(case.plain).bfloat16()))
    other = copy.deepcopy(case.plain)
    for parameter in other.parameters():
        parameter.mul_(1 + 0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    assert same_weights(stored, stored) and same_weights(plain, half)
    assert not same_weights(stored, fingerprint_of(other))
    if way in FOUR:
        assert not same_weights(stored, plain) and "in 4 bits, which match no other precision" in short(stored)
    else:
        assert all(same_weights(*pair) for pair in ((stored, plain), (plain, stored), (stored, half)))
        assert short(stored).endswith(" in 8 bits")


@pytest.mark.parametrize(("network", "way"), CASES)
@torch.no_grad()
def test_neurons_are_tapped_scored_blocked_and_baked_or_refused(network, way, no_hooks_left):
    case = Case(network, way)
    no_hooks_left(case.plain)
    neurons = NeuronSet({case.site.address: (0, 1)}, fingerprint_of(case.net))
    with capture(case.net, case.site.address) as taps:
        plain = case.forward()
    assert torch.isfinite(taps[case.site.address].tensor).all()
    away, size = (plain - case.forward(case.reference)).abs().mean(), plain.abs().mean()
    assert away < (0.5 if way in FOUR else 0.2) * size
    with block(case.net, neurons):
        blocked = case.forward()
    assert not torch.equal(blocked, plain) and torch.equal(case.forward(), plain)
    scores, _ = score_prompts(make_probe(case.denoiser), [case.cond.take(torch.tensor([0]))], (4, 16, 16), 0.0)
    assert 0 < scores[0].value < 1
    if is_packed(case.net.get_submodule(case.site.path).weight):
        with pytest.raises(VitrineError, match="weights to bake: given .* stored as"):
            bake(case.net, neurons)
        return
    case.net.load_state_dict(bake(case.net, neurons), strict=False)
    torch.testing.assert_close(case.forward(), blocked)


@pytest.mark.parametrize(("network", "way"), CASES)
def test_models_of_a_space_are_drawn_and_inverted_or_refused(network, way):
    case = Case(network, way)
    space = space_on(case.plain)
    rows = space.mean[None].repeat(2, 1)
    with torch.no_grad():
        changes = []
        for denoiser in (case.denoiser, case.reference):
            before = case.forward(denoiser)
            with late_lora(denoiser.backbone, space.manifest, rows):
                changes.append(case.forward(denoiser) - before)
    assert (changes[0] - changes[1]).square().mean() < 0.1 * changes[1].square().mean()
    config, one = InvertConfig(steps=4, check_every=4, components=2), case.cond.take(torch.tensor([0]))
    if way in ("layerwise", "int8, inputs too"):
        calls = []
        case.net.register_forward_pre_hook(lambda *a: calls.append(1))
        with pytest.raises(VitrineError, match="network: given"):
            invert(case.denoiser, space, case.x[:1], one, config)
        assert not calls
        return
    made, wanted = (invert(d, space, case.x[:1], one, config) for d in (case.denoiser, case.reference))
    assert float(made.losses[-1][1][0]) == pytest.approx(float(wanted.losses[-1][1][0]), rel=0.1)
