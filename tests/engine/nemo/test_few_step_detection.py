"""Detection by few-step samples: how they are made, when they agree, and what a verdict carries."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.sampling import few_step_latents, sample
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import Agreement, Calibration, FewStepConfig, FewStepSampler, SampleThreshold, sample_agreement
from vitrine.engine.nemo import sample_threshold as threshold_of
from vitrine.engine.nemo.adjust import usual_pull
from vitrine.engine.nemo.block import block
from vitrine.engine.nemo.caption_evidence import caption_evidence
from vitrine.engine.nemo.find import find_neurons, make_probe
from vitrine.engine.nemo.neuron_statistics import NeuronStatistics, gather
from vitrine.engine.nemo.neurons import NeuronSet, fingerprint_of
from vitrine.engine.nemo.noise_similarity import Request
from vitrine.engine.nemo.sites import value_activations, value_sites
from vitrine.engine.network.condition import Condition
from vitrine.engine.settings.nemo_options import ProbeConfig, SearchConfig
from vitrine_tests import models
from vitrine_tests.families import lumina2

SHAPE, TEXT = (4, 16, 16), models.TEXT
VP = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def denoiser():
    net = models.unet(cross_attention_dim=TEXT)
    return Denoiser.from_diffusers(net, DDIMScheduler(**VP))


@pytest.fixture(scope="module")
def conds():
    return [Condition(text[None]) for text in noise(3, 6, 5, TEXT)]


@pytest.fixture(scope="module")
def sampler(denoiser, conds):
    return FewStepSampler(denoiser, empty=conds[-1], sites=value_sites(denoiser.backbone, "all"))


@torch.no_grad()
def test_few_steps_are_the_librarys_ddim_with_trailing_spacing(denoiser, conds):
    scheduler = DDIMScheduler(**VP, timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True)
    x = noise(0, 2, *SHAPE)
    wanted = sample(denoiser, x, scheduler, 4, conds[0].take(torch.zeros(2).long()), null=conds[1], guidance=3.0)
    found = few_step_latents(denoiser, x, 4, conds[0], null=conds[1], guidance=3.0)
    assert torch.allclose(found, wanted, atol=1e-4) and float(found.std()) > 0.1
    longer = Condition(torch.cat([conds[1].text, conds[1].text], 1))
    assert torch.allclose(few_step_latents(denoiser, x, 4, conds[0], null=longer, guidance=3.0), found, atol=1e-4), (
        "an empty prompt of another length, whose copies change no attention, takes passes of its own"
    )


def test_few_steps_of_a_flow_are_eulers():
    net = Denoiser.from_diffusers(lumina2.diffusers(), FlowMatchEulerDiscreteScheduler(shift=1.0))
    x, cond = noise(0, 1, 16, 8, 12), Condition(noise(1, 1, 7, 20))
    for shift in (1.0, 3.0):
        wanted = sample(net, x, FlowMatchEulerDiscreteScheduler(shift=shift), 3, cond)
        found = few_step_latents(net, x, 3, cond, shift=shift)
        assert torch.allclose(found, wanted, atol=1e-5), shift


def test_rows_are_blocked_each_by_its_own_neurons(sampler, conds):
    net = sampler.denoiser.backbone
    blocked = {s.address: list(range(4)) for s in sampler.sites[:2]}
    x = sampler.noise(SHAPE)[:2]
    plain, other = sampler.samples([Request(conds[0], x, {}), Request(conds[0], x, blocked)])
    assert not torch.allclose(plain, other, atol=1e-3)
    with block(net, NeuronSet({a: tuple(n) for a, n in blocked.items()}, fingerprint_of(net))), torch.no_grad():
        whole = few_step_latents(sampler.denoiser, x, 4, conds[0], null=conds[-1], guidance=3.0)
    assert torch.allclose(other, whole, atol=1e-4)


def test_batches_change_nothing_and_are_counted(denoiser, conds):
    few, many = (FewStepSampler(denoiser, empty=conds[-1], rows=rows) for rows in (8, 80))
    one, other = (sample_agreement(s, conds[:3], SHAPE) for s in (few, many))
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a.distances, b.distances, atol=1e-4) and a.rows == 32 and a.count == 4
    assert few.forwards == many.forwards == 3 * 32


@torch.no_grad()
def test_prompts_of_other_lengths_are_as_each_alone(denoiser, conds):
    """Families without a mask encode each prompt at its own length: no batch may have two."""
    longer = [Condition(text[None]) for text in noise(4, 2, 9, TEXT)]
    prompts, x = [conds[0], longer[0], longer[1], conds[1]], noise(5, 2, *SHAPE)
    sampler = FewStepSampler(denoiser, empty=conds[-1], sites=value_sites(denoiser.backbone, "all"))
    probe = make_probe(denoiser, config=ProbeConfig(guidance=3.0), empty=conds[-1])
    for run in (sampler.samples, probe.signals):
        together = run([Request(cond, x, {}) for cond in prompts])
        alone = [run([Request(cond, x, {})])[0] for cond in prompts]
        assert not torch.allclose(together[0], together[1], atol=1e-3)
        assert torch.allclose(torch.stack(together), torch.stack(alone), atol=1e-4)
    seen = caption_evidence(denoiser, noise(6, 4, *SHAPE), prompts, conds[-1])
    each = [caption_evidence(denoiser, noise(6, 4, *SHAPE)[i : i + 1], prompts[i : i + 1], conds[-1]) for i in range(4)]
    assert torch.allclose(seen, torch.cat(each), atol=1e-5) and float(seen.std()) > 0
    pulls = [usual_pull(denoiser, [cond], conds[-1], x[:1], 981.0) for cond in prompts[:3]]
    assert usual_pull(denoiser, prompts[:3], conds[-1], x[:1], 981.0) == pytest.approx(sorted(pulls)[1], rel=1e-4)


@pytest.fixture
def usual():
    """Ten captions whose samples have nothing in common."""
    return [Agreement.of(noise(seed, 4, *SHAPE), FewStepConfig()) for seed in range(10)]


def test_a_verdict_needs_a_threshold_and_carries_what_it_is_made_of(usual):
    known = threshold_of(usual, "model")
    picture = noise(99, 1, *SHAPE)
    same = Agreement.of(picture + 0.05 * noise(98, 4, *SHAPE), FewStepConfig(), known)
    assert same.memorized and same.kind == "whole picture" and same.area == 1.0
    half = noise(97, 4, *SHAPE)
    half[..., :10] = picture[..., :10]
    part = Agreement.of(half, FewStepConfig(), replace(known, distance=known.usual))
    assert part.memorized and part.kind == "whole picture" and 0.5 < part.area < 0.7 and part.map.shape == (64, 64)
    assert bool((part.map[:, :30] < 1 / 3).all()) and bool((part.map[:, 50:] > 1 / 3).all()), "where they agree"
    ordinary = Agreement.of(noise(96, 4, *SHAPE), FewStepConfig(), known)
    assert not ordinary.memorized and ordinary.kind == "none" and ordinary.area == 0.0
    for said in ("4 samples", "seeds 1 to 4", "4 steps", "guidance 3", f"{known.distance:.4f}", "10 ordinary captions"):
        assert said in same.text(), said
    assert same.to_dict()["threshold"] == known.distance and same.columns()["captions"] == "10"
    assert usual[0].verdict == "no verdict" and "no threshold was measured" in usual[0].text()
    with pytest.raises(VitrineError, match="measured on this model"):
        assert usual[0].memorized
    with pytest.raises(VitrineError, match="finite"):
        Agreement.of(noise(1, 4, *SHAPE) * float("nan"), FewStepConfig())


def test_one_ordinary_caption_in_a_hundred_is_below():
    """Of distances whose logarithms are normal, or have a heavy tail (Laplace); few captions give fewer alarms."""
    generator = torch.Generator().manual_seed(0)

    def alarms(count, heavy):
        shares = []
        for _ in range(300):
            logs = torch.randn(count + 500, generator=generator)
            if heavy:
                logs = logs.sign() * -torch.rand(count + 500, generator=generator).log()
            drawn = (0.3 * logs - 1).double().exp()
            known = SampleThreshold.of(drawn[:count].tolist(), torch.ones(64, 64), FewStepConfig())
            shares.append(float((drawn[count:] < known.distance).double().mean()))
        return sum(shares) / len(shares)

    for heavy in (False, True):
        assert 0.007 < alarms(200, heavy) < 0.013 and 0.006 < alarms(100, heavy) < 0.014 > alarms(8, heavy), heavy
    with pytest.raises(VitrineError, match="2 or more"):
        SampleThreshold.of([1.0], torch.ones(64, 64), FewStepConfig())


def test_a_threshold_is_of_one_model_and_one_setting(usual, tmp_path, denoiser, conds):
    known = threshold_of(usual, "a" * 64)
    read = Calibration.load(Calibration(samples=known).save(tmp_path / "calibration.safetensors")).samples
    assert (read.distance, read.usual, read.config) == (known.distance, known.usual, known.config)
    assert torch.equal(read.places, known.places) and read.count == 10
    with pytest.raises(VitrineError, match="this model"):
        read.check("b" * 64)
    assert read.check("a" * 64) is read
    with pytest.raises(VitrineError, match="settings"):
        FewStepSampler(denoiser, FewStepConfig(steps=5), conds[-1], threshold=read)
    for config, words in ((FewStepConfig(two_stage=True), "two_stage"), (FewStepConfig(), "empty")):
        with pytest.raises(VitrineError, match=words):
            FewStepSampler(denoiser, config, conds[-1] if config.two_stage else None)
    for wrong in ({"seeds": 1}, {"steps": 0}, {"guidance": float("nan")}, {"guidance": -1.0}, {"shift": 0.0}):
        with pytest.raises(VitrineError):
            FewStepConfig(**wrong)


def test_two_stages_leave_out_what_differs_at_once(denoiser, conds, usual):
    every = FewStepSampler(denoiser, empty=conds[-1])
    whole = sample_agreement(every, conds[:4], SHAPE)
    firsts = sorted(float(a.distances[0]) for a in whole)
    known = replace(threshold_of(usual), usual=(firsts[1] + firsts[2]) / 2 / 0.7)
    staged = replace(every, config=FewStepConfig(two_stage=True), threshold=known, forwards=0)
    found = sample_agreement(staged, conds[:4], SHAPE)
    assert sorted(a.count for a in found) == [2, 2, 4, 4] and staged.forwards == 2 * 32 + 2 * 16
    for a, b in zip(found, whole, strict=True):
        assert torch.allclose(a.distances[0], b.distances[0], atol=1e-4)
        assert a.count == 2 or torch.allclose(a.distances, b.distances, atol=1e-4)
        assert a.rows == 8 * a.count


@pytest.mark.nightly
def test_an_exhausted_search_begins_again_in_all_layers_that_the_statistics_know(denoiser, conds):
    sites = value_sites(denoiser.backbone, "all")
    every = gather([value_activations(denoiser, Condition.batch(conds), sites)], [s.address for s in sites])
    probe = make_probe(denoiser, config=ProbeConfig(seeds=2))
    few = [s.address for s in probe.sites]
    narrow = NeuronStatistics({a: every.means[a] for a in few}, {a: every.stds[a] for a in few}, every.count)
    config = SearchConfig(tau=1e-6, effect_fraction=1.0, theta=1.5, theta_step=0.5)

    def searched(statistics, **change):
        (result,) = find_neurons(probe, ["a"], conds[:1], statistics, SHAPE, replace(config, **change))
        return result

    wide, kept, published = searched(every), searched(narrow), searched(every, protocol="nemo")
    assert wide.search.exhausted and kept.search.exhausted and wide.forwards > kept.forwards
    assert wide.settings["sites"] == [s.address for s in sites]
    assert kept.settings["sites"] == published.settings["sites"] == few, "as published, it ends in its own layers"
    judged = replace(wide, samples=(agreeing(0.01), agreeing(1.0)))
    assert judged.verdict == "reduced", "samples that differ do not make an exhausted search a success"


def agreeing(spread):
    known = SampleThreshold(0.3, 0.5, torch.ones(64, 64), 100, FewStepConfig())
    return Agreement.of(spread * noise(5, 4, *SHAPE), FewStepConfig(), known)
