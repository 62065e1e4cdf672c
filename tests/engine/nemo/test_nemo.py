"""NeMo against a straightforward reading of the published algorithm, on a small real UNet at 44 x 44 latents."""

import copy
import functools
import itertools

import pytest
import torch
from diffusers import DDIMScheduler
from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as published_ms_ssim
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    BlockConfig,
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    bake,
    block,
    find_neurons,
    fingerprint_of,
    gather,
    make_probe,
    score_prompts,
    value_activations,
    value_sites,
)
from vitrine.engine.nemo.find import Task, lockstep
from vitrine.engine.nemo.noise_similarity import Request, ddim_timestep, probe_noise
from vitrine.engine.nemo.search import candidates, search
from vitrine.engine.nemo.ssim import betas_for, ms_ssim
from vitrine.engine.network.condition import Condition
from vitrine_tests import models
from vitrine_tests.lanes import nightly_but

pytestmark = pytest.mark.rounding
SHAPE, SEEDS, TOKENS, WIDTH = (4, 44, 44), 3, 7, 24
SCHEDULER = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
PARITY = ProbeConfig(seeds=SEEDS, range_of_batch=True)


@pytest.fixture(scope="module")
def unet():
    """Random weights hardly react to text: the text's way through the network is amplified."""
    net = models.unet(
        sample_size=44,
        block_out_channels=(16, 32, 32),
        cross_attention_dim=WIDTH,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )
    for name, weight in net.named_parameters():
        if name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight")):
            weight.data *= 8
        if name == "conv_out.weight":
            weight.data *= 20
    return net


@pytest.fixture(scope="module")
def denoiser(unet):
    return Denoiser.from_diffusers(unet, SCHEDULER)


@pytest.fixture(scope="module")
def texts():
    """Row 0 is louder than the rest: its activations are outliers, as a memorized prompt's are."""
    made = torch.randn(40, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))
    made[0] *= 1.8
    return made


@pytest.fixture(scope="module")
def statistics(denoiser, texts):
    sites = value_sites(denoiser.backbone)
    batches = (value_activations(denoiser, Condition(part), sites) for part in texts[8:].split(5))
    return gather(batches, [s.address for s in sites])


# --- the straightforward algorithm: one set of neurons, one pass, weights zeroed by hand ---------------------------
class Straightforward:
    """Algorithms 1 to 4 as published, with a copy of the network for every set; nothing shared with the engine."""

    def __init__(self, unet, text, statistics):
        self.unet, self.text = unet, text
        self.layers = [n for n, _ in unet.named_modules() if n.endswith("attn2.to_v") and "up_blocks" not in n]
        self.means, self.stds = list(statistics.means.values()), list(statistics.stds.values())
        self.x = torch.randn(SEEDS, *SHAPE, generator=torch.Generator().manual_seed(1))
        self.passes = 0
        self.plain = self.difference([[]] * len(self.layers))

    def difference(self, lists):
        net = copy.deepcopy(self.unet)
        for layer, indices in zip(self.layers, lists, strict=True):
            net.get_submodule(layer).weight.data[indices] = 0
        self.passes += 1
        with torch.no_grad():
            d = net(self.x, 961, encoder_hidden_states=self.text.expand(SEEDS, -1, -1)).sample - self.x
        low, high = d.amin((2, 3), keepdim=True), d.amax((2, 3), keepdim=True)
        return (d - low) / (high - low)

    def activations(self):
        return [(self.unet.get_submodule(n).weight @ self.text[0].T).abs().mean(1).detach() for n in self.layers]

    def candidates(self, theta, k):
        lists = []
        for a, mean, std in zip(self.activations(), self.means, self.stds, strict=True):
            outliers = [i for i in range(len(a)) if abs((a[i] - mean[i]) / std[i]) > theta]
            lists.append(outliers + a.sort(descending=True).indices[:k].tolist())
        return lists

    def score(self, lists):
        d = self.difference([[n for n in x if n is not None] for x in lists])
        return float(published_ms_ssim(self.plain, d, reduction="none", kernel_size=11, betas=(0.33,) * 3).max())

    def initial(self, tau):
        theta, k, evaluated = 5.0, 0, 0
        while True:
            lists = self.candidates(theta, k)
            score = self.score(lists)
            evaluated += 1
            if score <= tau:
                return lists, score, tau, evaluated
            theta, k = theta - 0.25, k + 1
            if theta == 1:
                return lists, score, score, evaluated

    def refine(self, lists, limit):
        lists = [list(x) for x in lists]
        for layer in reversed(range(len(lists))):
            if lists[layer]:
                trial = [x if i != layer else [] for i, x in enumerate(lists)]
                lists = trial if self.score(trial) < limit else lists
        for layer in reversed(range(len(lists))):
            for position in range(len(lists[layer])):
                trial = [list(x) for x in lists]
                trial[layer][position] = None  # a hole, so that later positions stay what they were
                lists = trial if self.score(trial) < limit else lists
        return [[n for n in x if n is not None] for x in lists]


def everyone(denoiser, statistics, text, tau, mode, config=PARITY, rows=80):
    """The engine's search with every seed kept, as random nets' seeds hardly agree; returns (Outcome, probe)."""
    probe = make_probe(denoiser, config=config)
    noise = probe_noise(config, SHAPE)
    (plain,) = probe.signals([Request(Condition(text), noise, {})])
    found = [a.mean(0) for a in value_activations(denoiser, Condition(text), probe.sites)]
    addresses = [s.address for s in probe.sites]
    z = [statistics.z(ad, a) for ad, a in zip(addresses, found, strict=True)]
    settings = SearchConfig(mode=mode, rows=rows)
    searching = search(addresses, z, found, SEEDS, settings, tau, not config.range_of_batch)
    task = Task(Condition(text), noise, plain, searching)
    return lockstep(probe, {0: task})[0], probe


# --- activations, statistics, the signal ---------------------------------------------------------------------------
def test_sites_are_the_down_and_mid_values(unet):
    assert [s.path for s in value_sites(unet)] == [
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v",
        "down_blocks.2.attentions.0.transformer_blocks.0.attn2.to_v",
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_v",
    ]
    assert len(value_sites(unet, "all")) == 7
    with pytest.raises(VitrineError, match="down"):
        value_sites(unet, "sideways")


def test_activations_from_the_text_equal_those_of_a_forward(denoiser, unet, texts):
    seen = []
    handles = [
        unet.get_submodule(s.path).register_forward_hook(lambda m, a, o: seen.append(o.detach().abs().mean(1)))
        for s in value_sites(unet)
    ]
    with torch.no_grad():
        unet(torch.randn(3, *SHAPE), 500, encoder_hidden_states=texts[:3])
    for handle in handles:
        handle.remove()
    ours = value_activations(denoiser, Condition(texts[:3]), value_sites(unet))
    assert all(torch.equal(a, b) for a, b in zip(ours, seen, strict=True))


def test_streaming_statistics_equal_those_of_all_at_once(denoiser, texts, statistics):
    every = value_activations(denoiser, Condition(texts[8:]), value_sites(denoiser.backbone))
    for address, a in zip(statistics.means, every, strict=True):
        assert torch.allclose(statistics.means[address], a.mean(0), atol=1e-6)
        assert torch.allclose(statistics.stds[address], a.std(0), atol=1e-6)
    assert statistics.count == 32


def test_statistics_of_another_width_are_refused(statistics):
    with pytest.raises(VitrineError, match="width"):
        statistics.z(next(iter(statistics.means)), torch.zeros(1, 5))


def test_timesteps_of_the_official_loop():
    SCHEDULER.set_timesteps(50)
    assert [ddim_timestep(50, i) for i in range(50)] == SCHEDULER.timesteps.tolist()


def test_signal_and_cross_seed_score(denoiser, unet, texts, statistics):
    plain = Straightforward(unet, texts[:1], statistics)
    (score,), (signal,) = score_prompts(make_probe(denoiser, config=PARITY), [Condition(texts[:1])], SHAPE, 0.4)
    assert torch.allclose(signal, plain.plain, atol=2e-5)
    first, second = zip(*[(i, j) for i in range(SEEDS) for j in range(i + 1, SEEDS)], strict=True)
    settings = {"reduction": "none", "kernel_size": 11, "betas": (0.33,) * 3}
    pairs = published_ms_ssim(plain.plain[list(first)], plain.plain[list(second)], **settings)
    for seed in range(SEEDS):
        mine = [float(p) for p, i, j in zip(pairs, first, second, strict=True) if seed in (i, j)]
        assert abs(float(score.per_seed[seed]) - max(mine)) < 1e-5


@pytest.mark.parametrize("side", [44, 64])
@pytest.mark.parametrize("opposed", [False, True])
def test_ms_ssim_equals_torchmetrics(side, opposed):
    g = torch.Generator().manual_seed(side)
    a, noise = torch.rand(6, 4, side, side, generator=g), torch.rand(6, 4, side, side, generator=g)
    b = 0.6 * (1 - a) + 0.4 * noise if opposed else a + 0.3 * noise
    expected = published_ms_ssim(a, b, reduction="none", kernel_size=11, betas=(0.33,) * 3)
    assert torch.allclose(ms_ssim(a, b), expected, atol=1e-6)
    assert torch.allclose(ms_ssim(a, a), torch.ones(6))


def test_small_pictures_use_fewer_scales_and_say_so():
    assert [len(betas_for(s)) for s in (64, 44, 43, 22, 21, 11)] == [3, 3, 2, 2, 1, 1]
    with pytest.raises(VitrineError, match="decode"):
        betas_for(8)
    with pytest.raises(VitrineError, match="fewer"):
        ms_ssim(torch.rand(1, 1, 16, 16), torch.rand(1, 1, 16, 16))


# --- search --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("theta", "k"), [(5, 0), (3, 1), (2, 4)])
def test_candidate_lists_equal_the_published_ones(denoiser, unet, texts, statistics, theta, k):
    plain = Straightforward(unet, texts[1:2], statistics)
    a = [v.mean(0) for v in value_activations(denoiser, Condition(texts[1:2]), value_sites(unet))]
    addresses = list(statistics.means)
    z = [statistics.z(ad, v) for ad, v in zip(addresses, a, strict=True)]
    assert list(candidates(addresses, z, a, theta, k).values()) == plain.candidates(theta, k)


@pytest.fixture(scope="module")
def reference(unet, texts, statistics):
    """Outcomes of the straightforward algorithm: it stops at once, stops midway, or exhausts its candidates."""
    plain = Straightforward(unet, texts[:1], statistics)
    first, before, after = (plain.score(plain.candidates(5 - i / 4, i)) for i in (0, 6, 7))
    levels = {"at once": first + 1e-3, "midway": (before + after) / 2, "exhausted": 0.001}

    @functools.cache
    def outcome(case):
        lists, score, limit, count = plain.initial(levels[case])
        return levels[case], lists, score, count, plain.refine(lists, limit)

    return outcome


EVERY = list(itertools.product(("parity", "chain"), ("at once", "midway", "exhausted")))
BY_DAY = [("chain", "midway")]


@pytest.mark.parametrize(("mode", "case"), nightly_but(EVERY, BY_DAY))
def test_search_equals_the_published_algorithm(denoiser, texts, statistics, reference, case, mode):
    tau, lists, score, count, refined = reference(case)
    found, _ = everyone(denoiser, statistics, texts[:1], tau, mode)
    assert list(found.initial.values()) == lists
    assert abs(found.initial_score - score) < 1e-5
    assert mode == "chain" or found.evaluations == count
    assert found.exhausted == (case == "exhausted") and (not found.exhausted or count == 16)
    kept = [sorted(set(found.neurons.get(a, []))) for a in found.initial]
    assert kept == [sorted(set(x)) for x in refined]


@pytest.mark.parametrize("ahead", nightly_but([1, 4, 8, 16], []))
def test_how_far_the_chain_guesses_ahead_changes_nothing(denoiser, texts, statistics, reference, ahead):
    tau, _, _, _, refined = reference("midway")
    found, _ = everyone(denoiser, statistics, texts[:1], tau, "chain", rows=ahead * SEEDS)
    assert [sorted(set(found.neurons.get(a, []))) for a in found.initial] == [sorted(set(x)) for x in refined]


@pytest.mark.nightly
def test_chain_in_lockstep_with_others_finds_the_same(denoiser, texts, statistics):
    conds = [Condition(texts[i : i + 1]) for i in range(2)]
    probe = make_probe(denoiser, config=PARITY)
    prompts = ["a", "b"]
    together = find_neurons(probe, prompts, conds, statistics, SHAPE, SearchConfig(effect_fraction=0.5))
    for prompt, cond, result in zip(prompts, conds, together, strict=True):
        parity = SearchConfig(effect_fraction=0.5, mode="parity")
        (alone,) = find_neurons(probe, [prompt], [cond], statistics, SHAPE, parity)
        assert result.search.neurons and result.search.neurons == alone.search.neurons


@pytest.mark.nightly
def test_fast_mode_ends_below_the_threshold(denoiser, texts, statistics, reference):
    tau = reference("midway")[0]
    found, probe = everyone(denoiser, statistics, texts[:1], tau, "fast", ProbeConfig(seeds=SEEDS))
    (signal,) = probe.signals([Request(Condition(texts[:1]), probe_noise(PARITY, SHAPE), found.neurons)])
    (plain,) = probe.signals([Request(Condition(texts[:1]), probe_noise(PARITY, SHAPE), {})])
    assert float(probe.similarity(plain, signal).max()) <= tau + 1e-6


@pytest.mark.nightly
def test_progress_tells_how_much_of_one_prompts_search_is_decided(denoiser, texts, statistics):
    """It counted finished prompts: 0 of 1 to the end."""
    steps = []
    find_neurons(
        make_probe(denoiser, config=ProbeConfig(seeds=SEEDS)),
        ["p"],
        [Condition(texts[:1])],
        statistics,
        SHAPE,
        SearchConfig(tau=0.5, effect_fraction=0.5, mode="fast"),
        lambda *step: steps.append(step[:2]),
    )
    numbers = [step for step, _ in steps]
    assert numbers == sorted(numbers) and steps[-1] == (1000, 1000) and len({n for n in numbers if 0 < n < 1000}) > 5


def test_the_published_rule_leaves_prompts_below_tau_alone(denoiser, texts, statistics):
    (result,) = find_neurons(
        make_probe(denoiser, config=ProbeConfig(seeds=SEEDS)),
        ["p"],
        [Condition(texts[:1])],
        statistics,
        SHAPE,
        SearchConfig(tau=0.999, protocol="nemo"),
    )
    assert result.verdict == "not memorized" and len(result.neurons("")) == 0 and result.forwards == SEEDS


# --- blocking ------------------------------------------------------------------------------------------------------
def some_neurons(unet):
    sites = value_sites(unet)
    return NeuronSet({sites[0].address: (3, 7), sites[2].address: (0,)}, fingerprint_of(unet))


def test_blocking_equals_zeroed_weights_and_leaves_nothing(unet, texts):
    x, neurons = torch.randn(2, *SHAPE), some_neurons(unet)
    with torch.no_grad():
        before = unet(x, 500, encoder_hidden_states=texts[:2]).sample
        with block(unet, neurons):
            blocked = unet(x, 500, encoder_hidden_states=texts[:2]).sample
        after = unet(x, 500, encoder_hidden_states=texts[:2]).sample
        pruned = copy.deepcopy(unet)
        assert not pruned.load_state_dict(bake(unet, neurons), strict=False).unexpected_keys
        baked = pruned(x, 500, encoder_hidden_states=texts[:2]).sample
    assert torch.equal(before, after) and torch.equal(blocked, baked) and not torch.equal(before, blocked)


def test_rows_factor_and_sets_in_one_batch(unet, texts):
    x, neurons = torch.randn(1, *SHAPE).repeat(2, 1, 1, 1), some_neurons(unet)
    text = texts[:1].repeat(2, 1, 1)
    with torch.no_grad():
        plain = unet(x, 500, encoder_hidden_states=text).sample
        with block(unet, neurons, rows=torch.tensor([True, False])):
            half = unet(x, 500, encoder_hidden_states=text).sample
        with block(unet, neurons, BlockConfig(factor=1.0)):
            one = unet(x, 500, encoder_hidden_states=text).sample
    assert torch.equal(half[1], plain[1]) and not torch.equal(half[0], plain[0]) and torch.equal(one, plain)
    with pytest.raises(VitrineError, match="factor"):
        BlockConfig(factor=2.0)


def test_many_sets_in_one_batch_equal_each_alone(denoiser, unet, texts):
    probe = make_probe(denoiser, config=PARITY)
    noise, a = probe_noise(PARITY, SHAPE), probe.sites[0].address
    sets = [{a: [1, 1, 5]}, {}, {a: [2], probe.sites[2].address: [0, 9]}]
    together = probe.signals([Request(Condition(texts[:1]), noise, s) for s in sets])
    for blocked, signal in zip(sets, together, strict=True):
        (alone,) = probe.signals([Request(Condition(texts[:1]), noise, blocked)])
        assert torch.allclose(alone, signal, atol=2e-5)
    assert probe.forwards == 6 * SEEDS


def test_neuron_files(unet, tmp_path):
    neurons = some_neurons(unet)
    again = NeuronSet.load(neurons.save(tmp_path / "n.json"))
    assert again == neurons and len(again) == 3
    other = NeuronSet({value_sites(unet)[0].address: (5,)}, fingerprint_of(unet))
    assert len(neurons.merged(other)) == 4
    with pytest.raises(VitrineError, match="one model"):
        neurons.merged(NeuronSet({"x": (1,)}, "0123"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(VitrineError, match="bad.json"):
        NeuronSet.load(tmp_path / "bad.json")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_set_of_another_model_is_refused(unet):
    address = value_sites(unet)[0].address
    for neurons, word in (
        (NeuronSet({address: (1,)}, "feedfeedfeedfeed"), "this model"),
        (NeuronSet({address: (99,)}), "99"),
        (NeuronSet({"down-level7-cross-v": (1,)}), "down-level7"),
    ):
        with pytest.raises(VitrineError, match=word), block(unet, neurons):
            pass
