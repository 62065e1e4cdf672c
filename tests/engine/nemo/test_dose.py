"""The dose: neurons are blocked more and more until samples no longer agree; the file carries what was chosen."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    Agreement,
    BlockConfig,
    FewStepConfig,
    FewStepSampler,
    NeuronSet,
    ProbeConfig,
    SampleThreshold,
    SearchConfig,
    bake,
    block,
    dose,
    find,
    find_neurons,
    gather,
    make_probe,
    value_activations,
    value_sites,
)
from vitrine.engine.nemo.dose import (
    FACTORS,
    FRESH,
    MOST_COST,
    SAMPLES,
    STEP,
    UNTOUCHED,
    Dose,
    DoseCurve,
    DosePoint,
    dose_lines,
    dose_picture,
    doses_of,
    escalate,
)
from vitrine.engine.nemo.find import SEARCH_PART
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.nemo.probed_model import SampleBudget, setting, verbatim
from vitrine_tests import models

TEXT = models.TEXT


def point(copies, cost=0.1, factor=0.0, name="found", fresh=0):
    return DosePoint(Dose(name, {"a": (1,)}, factor), copies, SAMPLES + fresh, 0.9, cost, fresh)


def curve_of(*points, untouched=12):
    known = SampleThreshold(0.3, 0.5, torch.ones(64, 64), 100, FewStepConfig())
    agreement = Agreement.of(torch.randn(4, 4, 16, 16), FewStepConfig(), known)
    curve = DoseCurve(DosePoint(UNTOUCHED, untouched, 12, 0.1), agreement)
    for each in points:
        curve = curve.with_point(each, agreement, 96)
    return curve


def test_the_first_dose_that_leaves_no_copy_is_chosen_and_what_costs_too_much_is_not():
    cured = curve_of(point(6), point(0, factor=-0.1, fresh=FRESH))
    assert cured.verdict == "cured" and cured.chosen.dose.factor == -0.1 and cured.ended and cured.rows == 192
    assert not curve_of(point(6)).ended
    unverified = curve_of(point(6), point(0, factor=-0.1))
    assert unverified.verdict == "reduced" and not unverified.ended, "a dozen samples are too few for the word"
    failed = curve_of(point(1), point(3, factor=-0.1, fresh=FRESH))
    assert failed.chosen.dose.factor == -0.1, "3 of 44 are fewer than 1 of 12"
    assert failed.verdict == "reduced" and not failed.ended
    dear = curve_of(point(6), point(3, factor=-0.1), point(0, cost=9.0, name="everything"))
    assert dear.verdict == "reduced" and dear.chosen.dose.factor == -0.1 and not dear.ended
    assert curve_of(point(12), point(12, factor=-0.1)).verdict == "not cured"
    assert curve_of(point(0), untouched=0).verdict == "not memorized"


def test_the_report_names_each_dose_and_the_picture_shows_it():
    curve = curve_of(point(6), point(0, factor=-0.1, cost=float("nan"), fresh=FRESH))
    lines = dose_lines(curve.to_dict())
    assert "0 of 44 samples agree (32 of fresh seeds)" in lines[2] and curve.agreeing in lines[2]
    assert "more than 0.6" in dose_lines(curve_of(point(0, cost=0.9)).to_dict())[1]
    assert len(lines) == 3 and lines[0].startswith("untouched: 12 of 12") and lines[2].endswith("<- chosen")
    assert "move by 0.10" in lines[1] and "move" not in lines[2] and dose_lines(None) == []
    assert dose_picture(curve).size == (560, 320)
    whole = dose_picture(curve_of(point(6), point(0, cost=0.9)))
    colours = {colour for _, colour in whole.getcolors(1 << 16)}
    unmeasured = {colour for _, colour in dose_picture(curve).getcolors(1 << 16)}
    assert (150, 110, 40) in colours - unmeasured, "the most that a dose may cost, where the cost was measured"


def test_a_file_carries_its_dose_which_blocking_and_baking_apply(tmp_path):
    net, text, x = models.unet(cross_attention_dim=TEXT), torch.randn(1, 5, TEXT), torch.randn(1, 4, 16, 16)
    address = "mid-vit-block0-cross-v"
    path = NeuronSet({address: (1, 3)}, factor=-0.5).save(tmp_path / "neurons.json")
    neurons = NeuronSet.load(path)
    assert neurons.factor == -0.5 and neurons.without({address: [3]}).factor == -0.5

    def output(*blocked):
        with torch.no_grad(), block(net, *blocked):
            return net(x, 500, encoder_hidden_states=text).sample

    own, zero = output(neurons), output(neurons, BlockConfig(0.0))
    assert not torch.allclose(own, zero, atol=1e-5)
    assert torch.equal(own, output(neurons, BlockConfig(-0.5)))
    net.load_state_dict(bake(net, neurons), strict=False)
    assert torch.allclose(own, output(NeuronSet({})), atol=1e-5)
    for strange in (2.0, {address: [0.5]}):
        with pytest.raises(VitrineError):
            NeuronSet({address: (1, 3)}, factor=strange)
    path.write_text(path.read_text().replace("-0.5", '"much"'))
    with pytest.raises(VitrineError, match="neurons file"):
        NeuronSet.load(path)


def test_merged_sets_keep_a_factor_for_each_neuron():
    first, second = NeuronSet({"a": (3, 1)}, factor=-0.1), NeuronSet({"a": (3, 4), "b": (0,)})
    merged = first.merged(second)
    assert merged.neurons == {"a": (1, 3, 4), "b": (0,)}
    assert merged.factors("a") == (-0.1, -0.1, 0.0) and merged.factors("b") == (0.0,)
    assert merged.without({"a": [3]}).factors("a") == (-0.1, 0.0)
    assert first.merged(first).factor == -0.1


@dataclass
class Memorizing(FewStepSampler):
    """Samples that end in one picture while its neurons are multiplied by more than ``cured_at``; others differ.

    Attributes:
        rare_at: down to this factor one of 16 samples still does, but none of those that doses are tried on.
        moving: how much each blocked neuron moves ordinary captions.
    """

    cured_at: float = -0.1
    rare_at: float = 1.0
    moving: float = 0.01

    def samples(self, requests):
        self.forwards += sum(8 * len(r.noise) for r in requests)
        return [self._of(r) for r in requests]

    def _of(self, request):
        if any(request.cond is each for each in self.ordinary):
            return request.noise + self.moving * sum(map(len, request.blocked.values())) * (1 - request.factor)
        scale = torch.full((len(request.noise), 1, 1, 1), 0.05 if request.factor > self.cured_at else 1.0)
        if request.factor >= self.rare_at:
            scale[SAMPLES::16] = 0.05
        return scale * request.noise


@pytest.fixture(scope="module")
def searched():
    net = models.unet(cross_attention_dim=TEXT)
    denoiser, sites = Denoiser.from_diffusers(net, DDIMScheduler()), value_sites(net, "all")
    conds = [Condition(text[None]) for text in torch.randn(6, 5, TEXT, generator=torch.Generator().manual_seed(3))]
    statistics = gather([value_activations(denoiser, Condition.batch(conds), sites)], [s.address for s in sites])
    probe = make_probe(denoiser, config=ProbeConfig(seeds=2))
    usual = SampleThreshold(0.6, 1.4, torch.ones(64, 64), 100, FewStepConfig())
    sampler = Memorizing(denoiser, empty=conds[-1], sites=sites, threshold=usual, ordinary=conds[1:3])
    return probe, conds, statistics, sampler


def all_doses(judge, conds, outcomes, shape, most_rows, progress):
    """Where the search is shorter than a dose."""
    return escalate(judge, conds, outcomes, shape, None, progress)


def dosed(searched, progress=silent, protocol="vitrine", **change):
    probe, conds, statistics, sampler = searched
    config = SearchConfig(tau=0.01, effect_fraction=0.5, theta=1.5, theta_step=0.25, mode="fast", protocol=protocol)
    sampler = replace(sampler, forwards=0, **change)

    with mock.patch.object(find, "escalate", all_doses):
        (result,) = find_neurons(probe, ["a"], conds[:1], statistics, (4, 16, 16), config, progress, sampler)
    return result, sampler


def test_samples_decide_the_dose(searched):
    """Before, the search ended at factor 0, where these samples copy all the same, and one-step predictions differ."""
    steps = []
    result, sampler = dosed(searched, lambda step, total, _: steps.append(step / total))
    tried = [(p.dose.factor, p.copies) for p in result.curve.points]
    assert tried == [(0.0, 12), (-0.1, 0)] and result.curve.untouched.copies == 12 and result.verdict == "cured"
    neurons = result.neurons("")
    assert len(neurons) and neurons.factor == -0.1 and neurons.info["verdict"] == "cured"
    assert neurons.info["doses"]["chosen"] == 1 and result.curve.points[1].cost > result.curve.points[0].cost > 0
    before, after = result.samples
    assert before.memorized and not after.memorized
    assert result.curve.rows == sampler.forwards
    assert steps == sorted(steps) and steps[-1] == 1
    tried = [round((step - SEARCH_PART) / (1 - SEARCH_PART), 2) for step in steps if SEARCH_PART < step < 1]
    rows = [112, 224, 336 + 256]  # untouched, then one dose after another, the last one verified
    assert tried == pytest.approx([n / (112 + 7 * (112 + 256)) for n in rows], abs=0.01)
    published, _ = dosed(searched, protocol="nemo")
    assert published.curve is None and published.neurons("").factor == 0, "as published"


def test_a_dose_is_verified_on_seeds_that_it_was_not_tried_on(searched):
    """Before, factor -0.1 was called cured, of which one sample in 16 is a copy, but none of those it was tried on."""
    seeds, real = [], dose.seeded_noise
    with mock.patch.object(dose, "seeded_noise", lambda asked, *rest: seeds.append(list(asked)) or real(asked, *rest)):
        result, sampler = dosed(searched, rare_at=-0.1)
    tried = [(p.dose.factor, p.copies, p.samples, p.fresh) for p in result.curve.points]
    assert tried == [(0.0, 12, 12, 0), (-0.1, 2, 44, 32), (-0.2, 0, 44, 32)] and result.verdict == "cured"
    assert [len(each) for each in seeds] == [SAMPLES, FRESH, FRESH]
    assert len(set().union(*seeds)) == SAMPLES + 2 * FRESH, "each verification has seeds of its own"
    assert result.curve.rows == sampler.forwards
    never, _ = dosed(searched, rare_at=-1.0)
    assert never.verdict == "reduced" and never.curve.chosen.copies == 2 and never.curve.chosen.samples == 44


def test_what_cures_at_too_high_a_cost_is_weakened(searched):
    """Before, only stronger doses were tried, which cost more."""
    plain, _ = dosed(searched, cured_at=0.3)
    assert [p.dose.factor for p in plain.curve.points] == [0.0] and plain.verdict == "cured"
    dear = {"cured_at": 0.3, "moving": 0.01 * 1.2 * MOST_COST / plain.curve.chosen.cost}
    result, _ = dosed(searched, **dear)
    tried = [(p.dose.factor, p.affordable) for p in result.curve.points]
    assert tried == [(0.0, False), (pytest.approx(0.2), True)] and result.verdict == "cured"
    assert result.neurons("").factor == pytest.approx(0.2) and result.curve.chosen.cost > 0.9 * MOST_COST
    copying, _ = dosed(searched, **dear | {"cured_at": 0.1})
    assert [p.dose.factor for p in copying.curve.points] == [0.0, pytest.approx(0.2)]
    assert copying.verdict == "not cured" and copying.curve.chosen.affordable, "what costs too much is not taken"


def test_any_dose_that_is_too_strong_is_weakened():
    ladder = [Dose(f"{name}, factor {f:g}", {}, f) for name in ("found", "all") for f in FACTORS]
    assert curve_of().following(ladder) is ladder[0] and curve_of(point(3)).following(ladder) is ladder[1]
    dear = point(0, cost=0.62, factor=-0.1, name="found, factor -0.1")
    weaker = curve_of(point(2), dear).following(ladder)
    assert weaker.factor == pytest.approx(-STEP) and weaker.name == "found, factor -0.05"
    again = replace(dear, dose=weaker, cost=0.61)
    assert curve_of(point(2), dear, again).following(ladder).factor == 0, "a step more where it still costs too much"
    affordable = point(1, cost=0.58)
    assert curve_of(point(2), dear, affordable).following(ladder) is None, "all others cost more"
    assert curve_of(*[point(3)] * len(ladder)).following(ladder) is None


@pytest.mark.nightly
@pytest.mark.parametrize(("fails", "verdict"), [(True, "not cured"), (False, "cured")])
def test_doses_take_no_more_evaluations_than_the_search(searched, fails, verdict):
    """Each row that goes through the network is counted; where every dose fails, and where the first one holds."""
    probe, conds, statistics, fake = searched
    probe, counted = replace(probe, config=ProbeConfig(seeds=24)), []
    handle = probe.denoiser.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(len(args[0] if args else kwargs["sample"])), with_kwargs=True
    )
    agreeing = replace(fake.threshold, distance=1e3)
    real = FewStepSampler(probe.denoiser, empty=conds[-1], sites=fake.sites, threshold=agreeing, ordinary=conds[1:3])
    sampler = real if fails else replace(fake, forwards=0, cured_at=0.3)
    config = SearchConfig(tau=0.01, effect_fraction=0.5, theta=1.5, theta_step=0.25, mode="chain")

    def rows(judge):
        counted.clear()
        (result,) = find_neurons(probe, ["a"], conds[:1], statistics, (4, 16, 16), config, sampler=judge)
        return sum(counted) + (sampler.forwards if judge and not fails else 0), result

    try:
        (before, _), (after, result) = rows(None), rows(sampler)
    finally:
        handle.remove()
    assert result.verdict == verdict and before < after <= 2 * before
    assert len(result.curve.points) < len(doses_of(probe.denoiser.backbone, fake.sites, result.search))
    assert bool(result.curve.chosen.fresh) is not fails


def test_where_no_dose_holds_it_says_so(searched):
    result, _ = dosed(searched, cured_at=-2.0)
    names = [p.dose.name for p in result.curve.points]
    assert names[:3] == [f"found neurons, factor {f:g}" for f in FACTORS]
    assert names[-1] == "all of down and mid, factor 0" and result.verdict == "not cured"
    assert result.curve.chosen is result.curve.points[0], "the cheapest of those that do nothing"


def test_ordinary_prompts_are_not_escalated(searched):
    result, _ = dosed(searched, cured_at=1.5)
    assert result.verdict == "not memorized" and len(result.curve.points) == 1


@pytest.mark.nightly
def test_a_memorized_portrait_is_cured_by_samples():
    """Where only a part of the neurons is found, factor 0 leaves copies; samples see it and go on."""
    small = SampleBudget(statistics=60, calibration=12, plants=1, noises=3)
    probed, prompt = setting(budget=small, scope="all"), verbatim(small)[0].captions[0]
    config = SearchConfig(tau=probed.tau, effect_fraction=0.3, mode="fast", rows=40)
    probe = make_probe(probed.denoiser, config=ProbeConfig(seeds=3, timestep_index=4), rows=40)
    conds, shape = probed.conditions([prompt]), probed.model.latent_shape
    with mock.patch.object(find, "escalate", all_doses):
        (result,) = find_neurons(probe, [prompt], conds, probed.statistics, shape, config, sampler=probed.sampler(12))
    assert result.curve.untouched.copies == 12
    assert result.curve.points[0].copies > 0, "the published factor does not do here"
    assert result.curve.chosen.copies < result.curve.points[0].copies
