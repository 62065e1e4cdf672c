"""Attention maps reduced while they are computed, and joint maps of transformers."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.attention import MapReduction, attention_map
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models

pytestmark = pytest.mark.rounding


class Memory(TorchDispatchMode):
    """Bytes of tensors alive, and their peak, of everything made inside the block."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.add(storage.data_ptr(), storage.nbytes(), one)
        return out

    def add(self, pointer, size, owner):
        self.seen.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(owner, self.drop, pointer, size)

    def drop(self, pointer, size):
        self.seen.discard(pointer)
        self.now -= size


def parts(queries=40, keys=30, heads=4, width=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, queries, heads * width, generator=g), torch.randn(2, keys, heads * width, generator=g)


def plain(q, k, heads):
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2).double() for x in (q, k))
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)


@pytest.mark.parametrize("memory", [1, 9000, 2**24])
def test_every_reduction_equals_the_whole_map_reduced(memory):
    q, k = parts()
    whole = plain(q, k, 4)
    tokens, queries = (1, 29, 3), (39, 0)
    for how, expected in (
        (MapReduction(memory=memory), whole),
        (MapReduction("mean", memory=memory), whole.mean(1, keepdim=True)),
        (MapReduction("each", tokens, memory=memory), whole[..., list(tokens)]),
        (MapReduction("mean", tokens, queries, memory), whole.mean(1, keepdim=True)[:, :, list(queries)][..., tokens]),
    ):
        assert torch.allclose(attention_map(q, k, 4, how=how).double(), expected, atol=1e-6)


def test_a_bias_hides_tokens():
    q, k = parts()
    bias = torch.zeros(2, 1, 30)
    bias[0, :, 5:] = -10000
    found = attention_map(q, k, 4, bias, MapReduction("mean"))
    assert float(found[0, :, :, 5:].max()) == 0 and float(found[1, :, :, 5:].min()) > 0


def test_positions_that_are_not_there_are_refused():
    q, k = parts()
    for how in (MapReduction(tokens=(30,)), MapReduction(queries=(40,))):
        with pytest.raises(VitrineError, match="no such position"):
            attention_map(q, k, 4, how=how)
    for bad in ({"heads": "max"}, {"tokens": ()}, {"queries": (-1,)}, {"memory": 0}):
        with pytest.raises(VitrineError):
            MapReduction(**bad)


@pytest.mark.parametrize(("keys", "how"), [(4096, MapReduction("mean")), (77, MapReduction("mean", (3, 4)))])
def test_maps_of_a_64_by_64_layer_need_little_memory(keys, how):
    """gdf.md 5.4: one 64 x 64 self map of eight heads is 512 MiB in float32; the mean over heads is 64 MiB."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4096, 320, generator=g), torch.randn(1, keys, 320, generator=g)
    with Memory() as memory:
        found = attention_map(q, k, 8, how=how)
    working = memory.peak - found.numel() * found.element_size()
    assert working <= 64 * 2**20 and working < 8 * 4096 * keys * 4
    rows = [0, 1000, 4095]
    kept = list(how.tokens) if how.tokens else slice(None)
    expected = plain(q[:, rows], k, 8).mean(1)[..., kept]
    assert torch.allclose(found[0, 0, rows].double(), expected[0], atol=1e-6)


def unet():
    return models.unet(
        sample_size=64,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=2,
        attention_head_dim=2,
    )


def test_the_tap_keeps_what_was_asked_of_maps():
    denoiser, latents = Denoiser.from_diffusers(unet(), _scheduler()), torch.randn(2, 4, 16, 24)
    cond, place = Condition(torch.randn(1, 7, 24)), "up-level1-repeat0-vit-block0-cross-map"
    whole = tap_latents(denoiser, latents, cond, TapConfig((place,)))[place]
    config = TapConfig((place,), map_heads="mean", map_tokens=[2, 5])
    assert TapConfig.from_dict(config.to_dict()) == config
    kept = tap_latents(denoiser, latents, cond, config)[place]
    assert kept.tensor.shape == (2, 1, 24, 2) and whole.tensor.shape == (2, 2, 24, 7)
    assert torch.allclose(kept.tensor, whole.tensor.mean(1, keepdim=True)[..., [2, 5]], atol=1e-6)
    with pytest.raises(VitrineError, match="map_heads: given sum; accepted: each, mean"):
        TapConfig((place,), map_heads="sum")


# --- joint attention -----------------------------------------------------------------------------------------------
def sd3():
    return models.sd3(dual_attention_layers=(0,), qk_norm="rms_norm")


def flux():
    return models.flux(num_single_layers=2)


@pytest.mark.parametrize("make", [sd3, flux])
def test_joint_maps_times_values_are_what_the_model_computed(make):
    """Norms, rotary embedding and the order of streams are right if map @ values is what fused attention gave."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    net = make().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    given, values, text = {}, {}, 5
    blocks = [(f"vit-block{i}", b) for i, b in enumerate(net.transformer_blocks)]
    for name, block in blocks:
        block.attn.to_out[0].register_forward_hook(lambda m, a, o, n=name: given.update({n: a[0]}))
        block.attn.to_v.register_forward_hook(lambda m, a, o, n=name: values.update({n: o}))
        block.attn.add_v_proj.register_forward_hook(lambda m, a, o, n=name: values.update({f"{n}-text": o}))
    singles = list(getattr(net, "single_transformer_blocks", []))
    for j, block in enumerate(singles):
        name = f"vit-block{len(blocks) + j}"
        block.attn.to_v.register_forward_hook(lambda m, a, o, n=name: values.update({n: o}))
        block.attn.register_forward_hook(lambda m, a, o, n=name: given.update({n: o}))
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    x, cond = torch.randn(2, 4, 8, 12), Condition(torch.randn(2, text, 24), torch.randn(2, 20))
    names = [f"vit-block{i}-map" for i in range(len(blocks) + len(singles))]
    with torch.no_grad(), capture(net, names, early_exit=True) as early:
        denoiser.forward(x, 500, cond)
    with torch.no_grad(), capture(net, names) as taps:
        denoiser.forward(x, 500, cond)
    for i, name in enumerate(names):
        found, block = taps[name].tensor, f"vit-block{i}"
        assert found.shape == (2, 2, 24, text + 24) and torch.equal(found, early[name].tensor)
        assert torch.allclose(found.sum(-1), torch.ones(2, 2, 24), atol=1e-5)
        v = torch.cat([values[f"{block}-text"], values[block]], 1) if f"{block}-text" in values else values[block]
        v = v.unflatten(-1, (2, -1)).transpose(1, 2)
        image = given[block] if i < len(blocks) else given[block][:, text:]
        assert torch.allclose((found @ v).transpose(1, 2).flatten(2), image, atol=1e-5)


def test_words_of_a_joint_map_are_kept_alone():
    from diffusers import FlowMatchEulerDiscreteScheduler

    net = flux().eval()
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    cond, latents = Condition(torch.randn(1, 5, 24), torch.randn(1, 20)), torch.randn(2, 4, 8, 12)
    config = TapConfig(("vit-block*-map",), 500.0, map_heads="mean", map_tokens=(1, 3))
    for activation in tap_latents(denoiser, latents, cond, config).values():
        assert activation.tensor.shape == (2, 1, 24, 2)


def _scheduler():
    from diffusers import DDIMScheduler

    return DDIMScheduler(beta_schedule="scaled_linear")
