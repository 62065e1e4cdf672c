"""What the search records of each neuron that it kept."""

import json

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo import (
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    find_neurons,
    gather,
    held_by,
    make_probe,
    value_activations,
    value_sites,
)
from vitrine.engine.nemo.noise_similarity import Request, probe_noise
from vitrine.engine.network.condition import Condition
from vitrine_tests import models

SHAPE, TEXT, TOKENS, SEEDS = (4, 16, 16), 24, 7, 3
PROBE = ProbeConfig(seeds=SEEDS)


@pytest.fixture(scope="module")
def probed():
    net = models.unet(block_out_channels=(16, 32), cross_attention_dim=TEXT, **models.ATTENTION_LAST)
    for name, weight in net.named_parameters():
        if name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight")):
            weight.data *= 8
    denoiser = Denoiser.from_diffusers(net, DDIMScheduler(beta_schedule="scaled_linear"))
    texts = torch.randn(30, TOKENS, TEXT, generator=torch.Generator().manual_seed(5))
    texts[0, 4] *= 4  # one loud token
    sites = value_sites(net)
    statistics = gather(
        (value_activations(denoiser, Condition(part), sites) for part in texts[6:].split(8)), [s.address for s in sites]
    )
    probe = make_probe(denoiser, config=PROBE)
    cond = Condition(texts[:1])
    config = SearchConfig(tau=1e-6, effect_fraction=0.5)
    (result,) = find_neurons(probe, ["the loud one"], [cond], statistics, SHAPE, config)
    assert result.search is not None and result.search.neurons, "the search keeps neurons: the tests below need some"
    return net, probe, cond, statistics, result


def test_each_kept_neuron_has_its_record(probed):
    net, _, cond, statistics, result = probed
    neurons = result.neurons("model")
    table = held_by(neurons)
    assert set(table) == {(a, i) for a, indices in neurons.neurons.items() for i in indices}
    paths = {s.address: s.path for s in value_sites(net)}
    for (address, index), (record,) in table.items():
        values = (net.get_submodule(paths[address]).weight[index] @ cond.text[0].T).abs().detach()
        mean, std = statistics.means[address][index], statistics.stds[address][index]
        assert record["prompt"] == "the loud one" and record["activation"] == pytest.approx(float(values.mean()), 1e-4)
        assert record["deviations"] == pytest.approx(float((values.mean() - mean).abs() / std), 1e-3)
        assert [at for at, _ in record["tokens"]] == values.topk(3).indices.tolist()
        assert [value for _, value in record["tokens"]] == pytest.approx(values.topk(3).values.tolist(), 1e-4)


def test_alone_is_what_blocking_the_others_leaves(probed):
    """Of the neuron that was asked last: the set was then what it is now."""
    _, probe, cond, _, result = probed
    asked = [name for name, _, _ in result.search.tests if " #" in name]
    kept = {f"{r['address']} #{r['index']}": r for r in result.held if "alone" in r}
    last = kept[asked[-1]]
    others = NeuronSet(result.search.neurons).without({last["address"]: [last["index"]]}).neurons
    noise = probe_noise(PROBE, SHAPE)
    plain, blocked = probe.signals([Request(cond, noise, {}), Request(cond, noise, others)])
    keep = result.before.keep
    likeness = float(probe.similarity(plain[keep], blocked[keep]).max())
    assert last["limit"] - 1e-5 <= last["alone"] <= likeness + 1e-5


def test_records_survive_files_and_stand_side_by_side_in_merged_sets(probed, tmp_path):
    neurons = probed[-1].neurons("model")
    loaded = NeuronSet.load(neurons.save(tmp_path / "n.json"))
    assert json.dumps(sorted(held_by(loaded).items())) == json.dumps(sorted(held_by(neurons).items()))
    assert all(len(records) == 2 for records in held_by(neurons.merged(loaded)).values())
    assert held_by(NeuronSet({"mid-vit-block0-cross-v": (1,)})) == {}
