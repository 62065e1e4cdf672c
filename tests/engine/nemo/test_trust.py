"""What a verdict, a file of neurons and a blocked model promise, and when they must not promise it."""

import pytest
import torch
from diffusers import DDIMScheduler
from peft import LoraConfig, inject_adapter_in_model
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    Copies,
    NeuronSet,
    NeuronStatistics,
    ProbeConfig,
    SearchConfig,
    bake,
    block,
    find_neurons,
    make_probe,
    picture_distance,
    score_prompts,
    value_activations,
    value_sites,
)
from vitrine.engine.nemo.ssim import ms_ssim
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.hooks import edit
from vitrine_tests import models

SHAPE, SEEDS = (4, 24, 24), 3


@pytest.fixture(scope="module")
def unet():
    net = models.unet(sample_size=24, **models.ATTENTION_LAST)
    for name, weight in net.named_parameters():
        if name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight", "conv_out.weight")):
            weight.data *= 8  # random weights hardly react to text
    return net


@pytest.fixture(scope="module")
def text():
    return torch.randn(1, 5, models.TEXT, generator=torch.Generator().manual_seed(1))


def probe_of(unet, **settings):
    denoiser = Denoiser.from_diffusers(unet, DDIMScheduler())
    return make_probe(denoiser, "all", ProbeConfig(seeds=SEEDS, **settings))


def statistics_of(unet, text):
    sites = value_sites(unet, "all")
    values = value_activations(Denoiser.from_diffusers(unet, DDIMScheduler()), Condition(text), sites)
    means = {s.address: v[0] * 0 for s, v in zip(sites, values, strict=True)}
    return NeuronStatistics(means, {a: torch.ones_like(m) for a, m in means.items()}, 2)


def test_without_a_calibrated_tau_there_is_a_score_but_no_verdict(unet, text):
    probe = probe_of(unet)
    ((score,), _) = score_prompts(probe, [Condition(text)], SHAPE, None)
    assert 0 <= score.value <= 1
    for ask in (lambda: score.memorized, lambda: score.keep):
        with pytest.raises(VitrineError, match="measured on this model"):
            ask()
    with pytest.raises(VitrineError, match="measured on this model"):
        published = SearchConfig(protocol="nemo")
        find_neurons(probe, ["p"], [Condition(text)], statistics_of(unet, text), SHAPE, published)
    (asked,) = find_neurons(probe, ["p"], [Condition(text)], statistics_of(unet, text), SHAPE, SearchConfig())
    assert asked.search is not None and asked.verdict == "no verdict" and "seeds_kept" not in asked.to_dict()


def test_scores_say_how_they_were_measured(unet, text):
    """Below 44 latent pixels there are fewer scales, and below 22 one."""
    probe = probe_of(unet)
    words = {side: score_prompts(probe, [Condition(text)], (4, side, side), 0.5)[0][0].metric for side in (16, 24, 48)}
    assert words == {s: f"MS-SSIM of {n} scales, range 1" for s, n in {16: 1, 24: 2, 48: 3}.items()}


@pytest.mark.nightly
def test_parity_is_the_published_similarity(unet, text):
    """The official code takes the range of values from the batch."""
    statistics, conds = statistics_of(unet, text), [Condition(text)]

    def search(mode, **settings):
        config = SearchConfig(tau=0.01, effect_fraction=0.5, mode=mode)
        return find_neurons(probe_of(unet, **settings), ["p"], conds, statistics, SHAPE, config)[0]

    assert "range of the batch" in search("parity").before.metric
    assert torch.equal(search("parity").before.per_seed, search("chain", range_of_batch=True).before.per_seed)
    assert "range 1" in search("chain").before.metric
    probe = probe_of(unet, range_of_batch=True)
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)).sigmoid()
    assert torch.equal(probe.similarity(noise, noise.flip(0)), ms_ssim(noise, noise.flip(0), (0.5, 0.5), None))


def test_results_carry_their_settings_and_a_margin_that_means_something(unet, text):
    config = SearchConfig(tau=0.01, effect_fraction=0.5)
    (result,) = find_neurons(probe_of(unet), ["p"], [Condition(text)], statistics_of(unet, text), SHAPE, config)
    info = result.neurons("").info
    assert info["settings"]["search"] == config.to_dict() and info["settings"]["probe"]["range_of_batch"] is False
    assert result.search is not None and any(not dropped for _, _, dropped in result.search.tests), "nothing was kept"
    kept = [score for _, score, dropped in result.search.tests if not dropped]
    assert min(kept) >= result.search.threshold
    assert info["search"]["closest_decision"] > 0, "a kept neuron was noted with the threshold as its score"


@pytest.mark.parametrize("wrong", [{"theta": float("inf")}, {"theta_step": float("nan")}, {"theta_min": 6.0}])
def test_thresholds_that_never_end_are_refused(wrong):
    with pytest.raises(VitrineError, match="theta"):
        SearchConfig(**wrong)


@torch.no_grad()
def test_baking_reaches_a_projection_that_carries_a_lora(text):
    net = models.unet(**models.ATTENTION_LAST)
    site = value_sites(net, "all")[0]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False), net, "style")
    neurons = NeuronSet({site.address: (0, 3)})
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))

    def run():
        return net(x, torch.tensor(50.0), encoder_hidden_states=text).sample

    plain = run()
    with block(net, neurons):
        blocked = run()
    changed = bake(net, neurons)
    assert changed, "nothing was written, without a word"
    net.load_state_dict(changed, strict=False)
    torch.testing.assert_close(run(), blocked, rtol=0, atol=1e-6)
    assert not torch.allclose(blocked, plain, atol=1e-4)


def test_an_edit_that_no_forward_reaches_is_refused(unet, text):
    """As when a custom attention processor projects in a way of its own."""

    class Own:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs):
            return hidden_states

    net = models.unet(**models.ATTENTION_LAST)
    site = value_sites(net, "all")[0]
    attention = net.get_submodule(site.path.rsplit(".", 1)[0])
    x = torch.randn(1, 4, 16, 16)

    def run():
        net(x, torch.tensor(50.0), encoder_hidden_states=text)

    with torch.no_grad():
        with edit(net, {site: torch.zeros_like}):
            run()
        attention.set_processor(Own())
        with pytest.raises(VitrineError, match="never reached"), edit(net, {site: torch.zeros_like}):
            run()
        with pytest.raises(ZeroDivisionError), edit(net, {site: torch.zeros_like}):
            run()
            raise ZeroDivisionError
        with edit(net, {site: torch.zeros_like}):
            pass  # no forward, no promise


def test_cured_is_a_word_for_pictures_alone():
    """By the median of ten samples a caption passed as cured of which two were still copied."""
    ordinary = torch.full((5,), 0.3)
    near, far = torch.full((10,), 0.03), torch.full((10,), 0.25)
    two_left = torch.cat([near[:2], far[2:]])
    assert Copies(near, far, ordinary).verdict == "cured"
    assert Copies(near, two_left, ordinary).verdict == "reduced" and Copies(near, two_left, ordinary).copied == (10, 2)
    assert Copies(near, near, ordinary).verdict == "failed"
    assert Copies(far, far, ordinary).verdict == "nothing to cure"
    assert "10 of 10 samples are copies before, 2 after" in Copies(near, two_left, ordinary).text()


def test_distance_of_pictures_is_theirs_at_64_pixels():
    black, white = torch.zeros(1, 3, 128, 128), torch.ones(2, 3, 128, 128)
    assert picture_distance(white, black).tolist() == [1.0, 1.0]
    fine = (torch.arange(128) % 2).float().expand(1, 3, 128, 128)
    assert float(picture_distance(fine, black + 0.5)) == 0.0, "detail below the compared size counts nothing"
    with pytest.raises(VitrineError, match="size"):
        picture_distance(white, black[..., :64])
