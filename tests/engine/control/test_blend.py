"""The training-free blend on public size inputs: both ends are the model, the middle is the rule by hand."""

import pytest
import torch
from peft import LoraConfig
from vitrine.engine.control import (
    GammaConfig,
    ReferenceBlend,
    added_delta,
    blend,
    gamma,
    reference_input,
    sinusoid,
    weighted_delta,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.families.unet import sizes
from vitrine_tests import models
from vitrine_tests.engine.control_networks import POOLED, SMALL, TEXT, T, X, build, seen

pytestmark = pytest.mark.rounding
IDS = torch.tensor([[300.0, 200, 0, 64, 1024, 768], [2000, 1500, 32, 0, 1024, 768]])
REFERENCE = torch.cat([IDS[:, 4:], IDS[:, 2:]], 1)


def sdxl(lora=False):
    net = models.unet_xl(**SMALL, **models.ATTENTION_FIRST, projection_class_embeddings_input_dim=16 + 48)
    if lora:
        places = ["add_embedding.linear_1", "add_embedding.linear_2"]
        net.add_adapter(LoraConfig(r=2, target_modules=places, init_lora_weights=False))
    return net.requires_grad_(False)


def told(net, ids, t=T, x=X, text=TEXT[..., :8], pooled=POOLED):
    return net(x, t, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": ids}).sample


def vector(net, ids):
    return torch.cat([POOLED, net.add_time_proj(ids.flatten()).reshape(2, -1)], 1)


@pytest.mark.parametrize("lora", [False, True])
def test_the_blend_has_the_model_at_both_ends(lora, no_hooks_left):
    net = sdxl(lora)
    plain, neutral = told(net, IDS), told(net, REFERENCE)
    assert not torch.equal(plain, neutral)
    with ReferenceBlend(net, GammaConfig("constant")):
        assert torch.equal(told(net, IDS), plain)
    with ReferenceBlend(net, GammaConfig("step", step_at=0.0)):
        assert torch.equal(told(net, IDS), neutral)
    with ReferenceBlend(net, GammaConfig()):
        assert torch.equal(told(net, IDS, torch.zeros(2)), told(net, IDS, torch.zeros(2)))
        early = told(net, IDS, torch.full((2,), 1000.0))
    assert torch.equal(early, told(net, REFERENCE, torch.full((2,), 1000.0)))
    assert torch.equal(told(net, IDS), plain)
    no_hooks_left(net)


@pytest.mark.parametrize("lora", [False, True])
def test_the_blend_is_the_rule_by_hand_with_a_weight_for_each_row(lora):
    net = sdxl(lora)
    full, ref = net.add_embedding(vector(net, IDS)), net.add_embedding(vector(net, REFERENCE))
    weight = torch.tensor([gamma(0.7), gamma(0.2)])[:, None].float()
    by_hand = ref + weight * (full - ref)
    with ReferenceBlend(net, GammaConfig()):
        found, added = seen(net, "add_embedding", lambda: told(net, IDS))
        swapped = told(net, IDS.flip(0), T.flip(0), X.flip(0), TEXT.flip(0)[..., :8], POOLED.flip(0))
    assert torch.allclose(added, by_hand, atol=1e-6)
    handle = net.add_embedding.register_forward_hook(lambda m, a, out: by_hand)
    oracle = told(net, IDS)
    handle.remove()
    assert torch.allclose(found, oracle, atol=1e-6)
    assert torch.allclose(swapped.flip(0), found, atol=1e-6)
    at_input = net.add_embedding(vector(net, REFERENCE) + weight * (vector(net, IDS) - vector(net, REFERENCE)))
    assert float((at_input - by_hand).abs().max()) > 1e-3  # why it is not done there


def test_the_added_vector_is_linear_in_gamma():
    net = sdxl()
    found = {}
    for share in (0.0, 0.25, 0.5, 1.0):
        t = torch.full((2,), 1000 * (1 - share))
        with ReferenceBlend(net, GammaConfig("linear")):
            found[share] = seen(net, "add_embedding", lambda t=t: told(net, IDS, t))[1]
    assert torch.allclose(found[0.25], 0.75 * found[0.0] + 0.25 * found[1.0], atol=1e-6)
    assert torch.allclose(found[0.5], (found[0.0] + found[1.0]) / 2, atol=1e-6)


def test_alpha_changes_nothing_at_the_reference_and_crop_acts_at_any_alpha():
    net = sdxl()
    plain = told(net, REFERENCE)
    for alpha in (1.0, 8.0):
        with ReferenceBlend(net, GammaConfig(alpha=alpha)):
            assert torch.equal(told(net, REFERENCE), plain)
    first, cropped = torch.full((2,), 1000.0), IDS.clone()
    cropped[:, 2:4] += 400
    larger = IDS.clone()
    larger[:, :2] *= 3
    with ReferenceBlend(net, GammaConfig(alpha=8.0)):
        start = told(net, IDS, first)
        assert float((told(net, cropped, first) - start).abs().max()) > 1e-6
        assert torch.equal(told(net, larger, first), start)


def test_sizes_zeros_and_refusals():
    net = sdxl()
    sized = IDS.clone()
    sized[:, :2] = torch.tensor([640.0, 512.0])
    off = GammaConfig("step", step_at=0.0)
    with ReferenceBlend(net, off, (640, 512)):
        assert torch.equal(told(net, IDS), told(net, sized))
    with ReferenceBlend(net, off, "zeros"):
        added = seen(net, "add_embedding", lambda: told(net, IDS))[1]
    y = vector(net, IDS)
    y[:, 16:32] = 0
    assert torch.equal(added, net.add_embedding(y))
    with pytest.raises(VitrineError, match="text_time"):
        ReferenceBlend(build("unet")[0], off)
    with pytest.raises(VitrineError, match="nothing to weight"):
        ReferenceBlend(build("sd3")[0], off)
    for bad in ("size", (0, 5)):
        with pytest.raises(VitrineError, match="reference"):
            ReferenceBlend(net, off, bad)


def test_the_delta_gives_the_same_vector_beside_the_models_own():
    net = sdxl()
    y, weight = vector(net, IDS), torch.tensor([0.3, 1.0], dtype=torch.float64)
    neutral = reference_input(y, sizes(net), "target")
    assert torch.equal(neutral, vector(net, REFERENCE))
    delta = added_delta(net.add_embedding, y, neutral)
    share = weighted_delta(delta, weight)
    assert bool((share[1] == 0).all())
    mixed = blend(net.add_embedding(y), net.add_embedding(neutral), weight)
    assert torch.allclose(net.add_embedding(y) + share, mixed, atol=1e-6)
    assert torch.equal(mixed[1], net.add_embedding(y)[1])
    assert bool((added_delta(net.add_embedding, neutral, neutral) == 0).all())
    # The sinusoid used where no model gives its own is the models' own.
    told_size = torch.tensor([640.0, 512.0])
    assert torch.allclose(sinusoid(told_size, channels=8), net.add_time_proj(told_size).flatten(), atol=1e-5)


def test_pixart_weighs_resolution_and_leaves_aspect():
    net, call = build("pixart")
    plain = call(net, X, T)
    with ReferenceBlend(net, GammaConfig("constant")):
        assert torch.equal(call(net, X, T), plain)
    neutral = call(net, X, T, ((64.0, 64.0), (64.0, 64.0)))
    with ReferenceBlend(net, GammaConfig("step", step_at=0.0)):
        assert torch.equal(call(net, X, T), neutral)
    emb, path = net.adaln_single.emb, "adaln_single.emb"
    with ReferenceBlend(net, GammaConfig()):
        added = seen(net, path, lambda: call(net, X, T))[1]
    ends = [seen(net, path, lambda s=s: call(net, X, T, (s, s)))[1] for s in ((64.0, 64.0), (512.0, 300.0))]
    weight = torch.tensor([gamma(0.7), gamma(0.2)])[:, None].float()
    assert torch.allclose(added, ends[0] + weight * (ends[1] - ends[0]), atol=1e-6)
    assert not torch.equal(plain, neutral) and emb.use_additional_conditions
    assert torch.equal(call(net, X, T), plain)
