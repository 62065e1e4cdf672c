"""NEMO beyond the search on SD1.x: guidance, baselines, verification, chosen tokens, other model families."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    AttackConfig,
    BlockConfig,
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    VerifyConfig,
    adversarial_embedding,
    block,
    find_neurons,
    fingerprint_of,
    gather,
    make_probe,
    score_prompts,
    value_activations,
    value_sites,
    verify,
)
from vitrine.engine.nemo.block import token_positions
from vitrine.engine.nemo.neuron_statistics import import_official
from vitrine.engine.nemo.noise_similarity import Request, min_max, probe_noise
from vitrine.engine.network.condition import Condition
from vitrine.evidence.nemo.baselines import attention_scaling, without_padding
from vitrine_tests import models

pytestmark = pytest.mark.rounding
SHAPE, TEXT = (4, 16, 16), 24


def unet():
    net = models.unet(block_out_channels=(16, 32), cross_attention_dim=TEXT, **models.ATTENTION_LAST)
    for name, weight in net.named_parameters():
        if name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight")):
            weight.data *= 8
    return net


def texts(count=1, tokens=7, seed=3):
    return torch.randn(count, tokens, TEXT, generator=torch.Generator().manual_seed(seed))


def of(net):
    return Denoiser.from_diffusers(net, DDIMScheduler(beta_schedule="scaled_linear"))


# --- guidance (checks 4 and 14) ------------------------------------------------------------------------------------
def test_guidance_follows_the_formula():
    net, (told, empty) = unet(), texts(2).split(1)
    config = ProbeConfig(seeds=3, guidance=7.0)
    probe = make_probe(of(net), config=config, empty=Condition(empty))
    noise = probe_noise(config, SHAPE)
    (found,) = probe.signals([Request(Condition(told), noise, {})])
    with torch.no_grad():
        cond, uncond = (net(noise, 961, encoder_hidden_states=e.expand(3, -1, -1)).sample for e in (told, empty))
    correct, exchanged = uncond + 7 * (cond - uncond), cond + 7 * (uncond - cond)
    assert torch.allclose(found, min_max(correct - noise), atol=5e-5)
    assert float((found - min_max(exchanged - noise)).abs().max()) > 1e-2
    assert probe.forwards == 6
    with pytest.raises(VitrineError, match="empty"):
        make_probe(of(net), config=config)


def test_one_forward_a_look():
    net, calls = unet(), []
    handle = net.register_forward_hook(lambda *a: calls.append(1))
    score_prompts(make_probe(of(net), config=ProbeConfig(seeds=4)), [Condition(texts())], SHAPE, 0.5)
    handle.remove()
    assert len(calls) == 1  # the official procedure makes two and drops the first


# --- official statistics (check 15) --------------------------------------------------------------------------------
def test_official_statistics_are_read_without_unpickling_code(tmp_path):
    widths = (320, 320, 640, 640, 1280, 1280, 1280)
    path = tmp_path / "statistics.pt"
    torch.save(([torch.rand(w) for w in widths], [torch.rand(w) for w in widths]), path)
    addresses = [f"layer{i}" for i in range(7)]
    assert [len(v) for v in import_official(path, addresses).means.values()] == list(widths)
    with pytest.raises(VitrineError, match="7 layers"):
        import_official(path, addresses[:3])
    torch.save(Refused(), path)
    with pytest.raises(VitrineError, match="two lists"):
        import_official(path, addresses)


class Refused:
    """Any class of one's own: a pickle with it needs code to load."""


# --- baselines -----------------------------------------------------------------------------------------------------
def test_attention_scaling_multiplies_the_start_tokens_score():
    """Against attention written out: softmax with the first score times 1.25, in the rows asked for."""
    net, text = unet(), texts(2)
    x = torch.randn(2, *SHAPE)
    attention = net.mid_block.attentions[0].transformer_blocks[0].attn2
    seen = []
    with torch.no_grad(), attention_scaling(net, rows=torch.tensor([True, False])):
        handle = attention.register_forward_hook(lambda m, a, k, o: seen.append((a[0], o)), with_kwargs=True)
        net(x, 500, encoder_hidden_states=text)
        handle.remove()
    (hidden, out) = seen[0]
    q, k, v = attention.to_q(hidden), attention.to_k(text), attention.to_v(text)
    q, k, v = (t.detach().unflatten(-1, (attention.heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores[0, :, :, 0] *= 1.25
    plain = attention.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).detach()
    assert torch.allclose(out, plain, atol=1e-5)


def test_leaving_padding_out_equals_a_mask():
    net, x, text = unet(), torch.randn(1, *SHAPE), texts()
    mask = torch.tensor([[1.0, 1, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        short = net(x, 500, encoder_hidden_states=without_padding(Condition(text), 3).text).sample
        masked = net(x, 500, encoder_hidden_states=text, encoder_attention_mask=mask).sample
    assert torch.allclose(short, masked, atol=1e-5)
    with pytest.raises(VitrineError, match="number of tokens"):
        without_padding(Condition(text), 9)


# --- chosen tokens -------------------------------------------------------------------------------------------------
def test_tokens_limit_blocking():
    net, text = unet(), texts()
    site = value_sites(net)[0]
    x, neurons = torch.randn(1, *SHAPE), NeuronSet({site.address: (2, 5)}, fingerprint_of(net))
    seen = []
    with torch.no_grad(), block(net, neurons, BlockConfig(tokens=(1, 4, 99))):
        handle = net.get_submodule(site.path).register_forward_hook(lambda m, a, o: seen.append(o))
        net(x, 500, encoder_hidden_states=text)
        handle.remove()
    plain = net.get_submodule(site.path)(text).detach()
    expected = plain.clone()
    for token in (1, 4):
        expected[:, token, [2, 5]] = 0
    assert torch.equal(seen[0], expected)
    assert token_positions("3-5, 9") == (3, 4, 5, 9) and token_positions(" ") is None
    for bad in ("5-3", "a", "1-2-3", "-1"):
        with pytest.raises(VitrineError, match="positions"):
            token_positions(bad)


# --- verification --------------------------------------------------------------------------------------------------
def test_attack_follows_the_loss_downwards_and_leaves_no_trace(no_hooks_left):
    net, text = unet(), texts()
    denoiser, neurons = of(net), NeuronSet({value_sites(net)[0].address: (1, 2)}, fingerprint_of(net))
    picture = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(9))
    config = AttackConfig(steps=12, batch=4)
    found = adversarial_embedding(denoiser, Condition(text), picture, neurons, config)

    def loss(cond):
        g = torch.Generator().manual_seed(77)
        noise, t = torch.randn(64, *SHAPE, generator=g), torch.randint(1000, (64,), generator=g).float()
        with torch.no_grad(), block(net, neurons):
            x = denoiser.network_input(picture.expand(64, *SHAPE), noise, t)
            rows = torch.zeros(64, dtype=torch.long)
            return float((denoiser.predict(x, t, cond.take(rows)).eps - noise).square().mean())

    assert loss(found) < loss(Condition(text)) and not found.text.requires_grad
    assert all(p.grad is None for p in net.parameters())
    no_hooks_left(net)
    with pytest.raises(VitrineError, match="one each"):
        adversarial_embedding(denoiser, Condition(texts(2)), picture, neurons, config)


def test_an_interrupted_attack_leaves_no_hook(no_hooks_left):
    net = unet()
    neurons = NeuronSet({value_sites(net)[0].address: (1,)}, fingerprint_of(net))

    def stop(step, total, preview):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adversarial_embedding(of(net), Condition(texts()), torch.randn(1, *SHAPE), neurons, progress=stop)
    no_hooks_left(net)


def test_verification_says_in_words_what_it_found():
    net, probe_config = unet(), ProbeConfig(seeds=3)
    probe, cond = make_probe(of(net), config=probe_config), Condition(texts())
    neurons = NeuronSet({s.address: (0, 1, 2) for s in probe.sites}, fingerprint_of(net))
    plain = verify(probe, cond, neurons, SHAPE, VerifyConfig(0.001))
    assert plain.untouched.memorized and "NOT enough" in plain.text() and "does not erase" in plain.text()
    assert "not tried" in plain.text() and probe.config.seed == 1
    config = VerifyConfig(0.999, attack=AttackConfig(2))
    attacked = verify(probe, cond, neurons, SHAPE, config, reference=torch.randn(1, *SHAPE))
    assert "nothing to verify" in attacked.text() and attacked.attacked is not None
    with pytest.raises(VitrineError, match="this model"):
        verify(probe, cond, NeuronSet(neurons.neurons, "feedfeedfeedfeed"), SHAPE, VerifyConfig(0.5))


# --- other families: no published evidence, but the search must run -----------------------------------------------
FAMILIES = {
    models.pixart: {"attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": TEXT},
    models.sd3: {"joint_attention_dim": TEXT},
    models.flux: {"joint_attention_dim": TEXT},
}


@pytest.mark.parametrize("make", FAMILIES)
def test_other_families_are_searched_and_blocked(make):
    net = make(**FAMILIES[make])
    scheduler = DDIMScheduler() if make is models.pixart else FlowMatchEulerDiscreteScheduler()
    denoiser, config = Denoiser.from_diffusers(net, scheduler), ProbeConfig(seeds=3, signal="x0")
    pooled = None if make is models.pixart else torch.randn(12, 20)
    conds = [Condition(t[None], None if pooled is None else pooled[i : i + 1]) for i, t in enumerate(texts(12) * 2)]
    probe = make_probe(denoiser, config=config)
    assert probe.sites and all(s.address.endswith(("-cross-v", "-ctx-v")) for s in probe.sites)
    x = torch.randn(1, *SHAPE)
    batches = (value_activations(denoiser, c, probe.sites, x, probe.t) for c in conds[2:])
    statistics = gather(batches, [s.address for s in probe.sites])
    search = SearchConfig(tau=score_prompts(probe, conds[:1], SHAPE, 1.0)[0][0].value * 0.5, effect_fraction=0.01)
    (result,) = find_neurons(probe, ["p"], conds[:1], statistics, SHAPE, search)
    assert result.search is not None and result.verdict in ("changed", "reduced", "failed")
    neurons = NeuronSet({s.address: range(8) for s in probe.sites}, fingerprint_of(net))
    with torch.no_grad():
        before = denoiser.forward(x, 500, conds[0])
        with block(net, neurons):
            blocked = denoiser.forward(x, 500, conds[0])
        assert torch.equal(before, denoiser.forward(x, 500, conds[0])) and not torch.equal(before, blocked)
