"""Attention maps of every family are what the network attends with: a map times the values is attention's result."""

from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.families.packing import MASK
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests.families.twin import NAMES, inputs, network

pytestmark = pytest.mark.rounding
MASKED = ("qwen_image", "chroma", "krea2", "z_image")
GATED = ("krea2",)  # a gate stands between a map's result and the projection


def maps_of(net):
    """(map, values' addresses in the order of its keys, site of attention's output) of every block that has one."""
    sites = sites_of(net)
    for address in (a for a in sites if a.endswith("-map")):
        base = address.removesuffix("-map")
        out = sites.get(f"{base}-attn-out", sites.get(f"{base}-out"))
        alone = base.endswith(("-self", "-cross"))
        values = [f"{base}-v"] if alone or f"{base}-ctx-v" not in sites else [f"{base}-ctx-v", f"{base}-v"]
        if out is not None and (alone or out.address.endswith("-attn-out")):
            yield address, values, replace(out, address=f"{base}-given", before=True)


def tokens(tensor):
    return tensor if tensor.ndim == 3 else tensor.flatten(2).transpose(1, 2)


def taps(name, net, x, t, cond):
    places = list(maps_of(net))
    sites = [*sites_of(net).values(), *(given for _, _, given in places)]
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    with torch.no_grad(), capture(net, sites) as found:
        denoiser.forward(x, t, cond)
    return places, found


@pytest.mark.parametrize("name", NAMES)
def test_a_map_times_the_values_is_attentions_result(name):
    net, (x, t, cond) = network(name), inputs(name)
    if name == "z_image":  # 32 image tokens: no padding of the image, whose share a map leaves out
        x = torch.randn(2, 16, 8, 16, generator=torch.Generator().manual_seed(1))
    places, found = taps(name, net, x, t, cond)
    assert places
    for address, values, given in places:
        shown, result = found[address].tensor, tokens(found[given.address].tensor)
        heads, size = shown.shape[1], result.shape[-1] // shown.shape[1]
        v = torch.cat([tokens(found[a].tensor) for a in values], 1).unflatten(-1, (-1, size)).transpose(1, 2)
        v = v.repeat_interleave(heads // v.shape[1], 1)
        assert torch.allclose(shown.sum(-1), torch.ones_like(shown[..., 0]), atol=1e-5), address
        if name not in GATED:
            expected = (shown @ v).transpose(1, 2).flatten(2)
            assert torch.allclose(expected, result, atol=2e-5 * float(result.abs().max())), address


@pytest.mark.parametrize("name", MASKED)
def test_masked_tokens_have_no_share(name):
    net, (x, t, cond) = network(name), inputs(name)
    text = torch.cat([cond.text] * 8, 1)[:, :40]
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 5:] = 0  # Z-Image fills 5 tokens to 32 with tokens that attention sees, 40 to 64
    _, found = taps(name, net, x, t, Condition(text, cond.pooled, {MASK: mask}))
    first = 32 if name == "z_image" else 5
    for address in (a for a in found.activations if a.endswith("-map")):
        share = found[address].tensor[..., first : 64 if name == "z_image" else 40].sum(-1)
        assert float(share[0].max()) < 1e-6 and float(share[1].min()) > 0, address


def test_lumina_refuses_prompts_of_unequal_length_in_one_batch():
    net, (x, t, cond) = network("lumina2"), inputs("lumina2")
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    with pytest.raises(VitrineError, match="one length"):
        taps("lumina2", net, x, t, Condition(cond.text, None, {MASK: mask}))
