"""The dose: neurons are blocked more and more until samples no longer agree; the file carries what was chosen."""

import functools
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
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
    escalation,
    find,
    find_neurons,
    gather,
    make_probe,
    value_activations,
    value_sites,
)
from vitrine.engine.nemo.blocked_copies import THIRD
from vitrine.engine.nemo.caption_evidence import NOISES
from vitrine.engine.nemo.dose import (
    FACTORS,
    FULL,
    MOST_COST,
    PART_FACTORS,
    STEP,
    UNTOUCHED,
    Dose,
    DoseCurve,
    DosePoint,
    dose_lines,
    dose_picture,
    doses_of,
)
from vitrine.engine.nemo.escalation import REFERENCES, SAMPLES, UNRELATED, escalate
from vitrine.engine.nemo.find import DOSES, SEARCH_PART
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.nemo.probed_model import SampleBudget, setting, verbatim
from vitrine_tests import models

TEXT = models.TEXT


def point(copies, cost=0.1, factor=0.0, name="found", full=0, full_copies=0, count=1):
    dose = Dose(name, {"a": tuple(range(count))}, factor)
    return DosePoint(dose, copies, SAMPLES, 0.9, cost, full_copies, full)


def curve_of(*points, untouched=12):
    known = SampleThreshold(0.3, 0.5, torch.ones(64, 64), 100, FewStepConfig())
    agreement = Agreement.of(torch.randn(4, 4, 16, 16), FewStepConfig(), known)
    curve = DoseCurve(DosePoint(UNTOUCHED, untouched, 12, 0.1, 0.0, REFERENCES, REFERENCES), agreement)
    for each in points:
        curve = curve.with_point(each, agreement, 96)
    return curve


def test_the_first_dose_that_leaves_no_copy_is_chosen_and_what_costs_too_much_is_not():
    every = sum(FULL)
    cured = curve_of(point(6), point(0, factor=-0.1, full=every))
    assert cured.verdict == "cured" and cured.chosen.dose.factor == -0.1 and cured.ended and cured.rows == 192
    assert not curve_of(point(6)).ended
    for few in (0, FULL[0]):
        unverified = curve_of(point(6), point(0, factor=-0.1, full=few))
        assert unverified.verdict == "reduced" and not unverified.ended, "so few samples are not enough for the word"
    copying = curve_of(point(0, full=8, full_copies=4), point(0, factor=-0.1, full=8, full_copies=1))
    assert copying.verdict == "reduced" and copying.chosen.dose.factor == -0.1 and not copying.ended
    assert curve_of(point(0, full=8, full_copies=8)).verdict == "not cured", "full samples copy as before"
    dear = curve_of(point(6), point(3, factor=-0.1), point(0, cost=9.0, name="everything"))
    assert dear.verdict == "reduced" and dear.chosen.dose.factor == -0.1 and not dear.ended
    assert curve_of(point(12), point(12, factor=-0.1)).verdict == "not cured"
    assert curve_of(point(0), untouched=0).verdict == "not memorized"


def test_two_few_step_samples_that_agree_do_not_make_a_prompt_memorized():
    """Before, an ordinary caption of which two of twelve did was searched on, and called cured."""
    every = sum(FULL)
    ordinary = curve_of(point(0, full=every), untouched=2)
    ordinary = replace(ordinary, untouched=replace(ordinary.untouched, full_copies=1))
    assert not ordinary.before.memorized and ordinary.verdict == "not memorized" and ordinary.ended
    assert not ordinary.clear, "it needs no full samples"
    assert replace(ordinary, before=mock.Mock(memorized=True)).verdict == "cured"
    assert curve_of(point(0, full=every), untouched=2).verdict == "cured", "untouched full samples agree"


def test_the_report_names_each_dose_and_the_picture_shows_it():
    curve = curve_of(point(6), point(0, factor=-0.1, cost=float("nan"), full=32))
    lines = dose_lines(curve.to_dict())
    assert "0 of 12 few-step samples agree, 0 of 32 full ones" in lines[2] and curve.agreeing in lines[2]
    assert "more than 20 %" in dose_lines(curve_of(point(0, cost=0.9)).to_dict())[1]
    assert len(lines) == 3 and lines[0].startswith("untouched: 12 of 12") and lines[2].endswith("<- chosen")
    assert "show 10 % less" in lines[1] and "less" not in lines[2] and dose_lines(None) == []
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
    for factor in (*FACTORS, *PART_FACTORS):
        assert NeuronSet.load(replace(neurons, factor=factor).save(tmp_path / "dose.json")).factor == factor
        assert not torch.allclose(output(replace(neurons, factor=factor)), own, atol=1e-5) or factor == -0.5
    for strange in (2.0, -2.1, {address: [0.5]}):
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
        full_at: the same of full samples.
        every: only each so many-th full sample does, below ``cured_at``.
        moving: how much each blocked neuron moves ordinary captions.
    """

    cured_at: float = -0.1
    full_at: float = -0.1
    every: int = 1
    moving: float = 0.001

    def samples(self, requests, steps=None, counted=None):
        rows = 2 * (steps or 4) * sum(len(r.noise) for r in requests)
        self.forwards += rows
        if counted is not None:
            counted(rows)
        return [self._of(r, steps) for r in requests]

    def _of(self, request, steps):
        if any(request.cond is each for each in self.ordinary):
            return request.noise + self.moving * sum(map(len, request.blocked.values())) * (1 - request.factor)
        scale = torch.full((len(request.noise), 1, 1, 1), 0.05 if request.factor > self.cured_at else 1.0)
        if steps is not None and request.factor > self.full_at:
            scale[self.every - 1 :: self.every] = 0.05
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


def all_doses(judge, conds, outcomes, shape, steps, most_rows, progress):
    """Where the search is shorter than a dose."""
    return escalate(judge, conds, outcomes, shape, steps, None, progress)


@functools.cache
def found_once():
    """The search itself, which no dose changes: its results by the number of layers that were searched."""
    real, known = find._found, {}

    def found(probe, *rest):
        if len(probe.sites) not in known:
            known[len(probe.sites)] = real(probe, *rest)
        return list(known[len(probe.sites)])

    return found


def unmoved(denoiser, latents, conds, empty, rows, counted):
    """What is seen of ordinary captions where a network knows one sample of them: less, the further it is moved."""
    counted(2 * NOISES * len(latents))
    known = seeded_noise([FewStepConfig().first_seed], latents.shape[1:])
    return 1 - (latents - known).square().mean((1, 2, 3)).sqrt()


def dosed(searched, progress=silent, protocol="vitrine", **change):
    """Searched anew where the progress or the published protocol is asked for."""
    probe, conds, statistics, sampler = searched
    config = SearchConfig(tau=0.01, effect_fraction=0.5, theta=1.5, theta_step=0.25, mode="fast", protocol=protocol)
    sampler = replace(sampler, forwards=0, **change)

    found = found_once() if progress is silent and protocol == "vitrine" else find._found
    patches = (find, "escalate", all_doses), (find, "_found", found), (escalation, "caption_evidence", unmoved)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        (result,) = find_neurons(probe, ["a"], conds[:1], statistics, (4, 16, 16), config, progress, sampler)
    return result, sampler


def test_samples_decide_the_dose(searched):
    """Before, the search ended at factor 0, where these samples copy all the same, and one-step predictions differ."""
    steps = []
    result, sampler = dosed(searched, lambda step, total, _: steps.append(step / total))
    tried = [(p.dose.factor, p.copies) for p in result.curve.points]
    assert (
        tried == [(0.0, 12), (PART_FACTORS[0], 0)] and result.curve.untouched.copies == 12 and result.verdict == "cured"
    )
    neurons = result.neurons("")
    assert len(neurons) and neurons.factor == PART_FACTORS[0] and neurons.info["verdict"] == "cured"
    assert neurons.info["doses"]["chosen"] == 1 and min(p.cost for p in result.curve.points) > 0
    before, after = result.samples
    assert before.memorized and not after.memorized
    evidence = 2 * NOISES * len(sampler.ordinary)
    assert result.curve.rows == sampler.forwards + 3 * evidence, "untouched, and at two doses"
    assert steps == sorted(steps) and steps[-1] == 1
    published, _ = dosed(searched, protocol="nemo")
    assert published.curve is None and published.neurons("").factor == 0, "as published"


def test_the_bar_counts_evaluations(searched):
    """Of as many as all doses would take with their full samples, of 20 steps."""
    steps = []
    result, sampler = dosed(searched, lambda step, total, _: steps.append(step / total))
    shares = [(step - SEARCH_PART) / (1 - SEARCH_PART) for step in steps if SEARCH_PART < step < 1]
    few, full, ordinary = 2 * 4, 2 * 20, 2
    evidence = 2 * NOISES * ordinary
    first = few * (SAMPLES + ordinary) + evidence + full * (ordinary + REFERENCES)
    dose, verified = few * (SAMPLES + ordinary) + evidence, full * sum(FULL)
    ladder = doses_of(sampler.denoiser.backbone, sampler.sites, result.search, result.held)
    most = first + len(ladder) * (dose + verified)
    spent = [few * SAMPLES, few * (SAMPLES + ordinary), few * (SAMPLES + ordinary) + evidence]
    spent += [spent[-1] + full * ordinary, first]
    for start in (first, first + dose):
        spent += [start + few * SAMPLES, start + dose - evidence, start + dose]
    spent += [first + 2 * dose + full * FULL[0], first + 2 * dose + verified]
    assert sampler.forwards == spent[-1] - 3 * evidence and ordinary <= UNRELATED
    assert shares == pytest.approx([rows / most for rows in spent], abs=0.002)


def test_full_samples_decide_whether_a_dose_cures(searched):
    """Before, few-step samples did, and said cured of pictures that full samples copied."""
    seeds, real = [], escalation.seeded_noise
    noise = lambda asked, *rest: seeds.append(list(asked)) or real(asked, *rest)  # noqa: E731
    with mock.patch.object(escalation, "seeded_noise", noise):
        result, sampler = dosed(searched, full_at=-1.5)
    tried = [(p.dose.factor, p.copies, p.full_copies, p.full) for p in result.curve.points]
    assert tried == [(0.0, 12, 0, 0), (-1.0, 0, 8, 8), (-0.1, 0, 8, 8), (-2.0, 0, 0, 32)] and result.verdict == "cured"
    assert result.curve.untouched.full_copies == REFERENCES
    assert result.curve.rows == sampler.forwards + 5 * 2 * NOISES * len(sampler.ordinary)
    fresh = [each for each in seeds if each[0] > SAMPLES]
    assert [len(each) for each in fresh] == [1, REFERENCES, FULL[0], FULL[0], *FULL]
    assert len(set().union(*fresh)) == sum(map(len, fresh)), "no seed judges twice"
    rare, _ = dosed(searched, full_at=-1.5, every=16)
    tried = [(p.dose.factor, p.full_copies, p.full) for p in rare.curve.points]
    assert tried[1] == (-1.0, 1, 32) and rare.verdict == "cured", "one copy in 24 is enough to go on"
    never, _ = dosed(searched, full_at=-9.0)
    assert never.verdict == "not cured" and all(p.full_copies for p in never.curve.points if p.full)
    partly, _ = dosed(searched, full_at=-9.0, every=8)
    assert partly.verdict == "reduced" and partly.curve.chosen.full_copies == 1 and partly.curve.chosen.full == 8


def test_a_sample_agrees_by_what_makes_a_copy(searched):
    """A third of the distance that full samples of ordinary captions have to the untouched picture."""
    few, near = torch.randn(4, 4, 8, 8), torch.zeros(3, 4, 8, 8)
    near[2] += 0.5
    unrelated = torch.full((3, 4, 8, 8), 3.0)
    reference = escalation._Reference.of(few, near, unrelated)
    assert reference.level == pytest.approx(3 * THIRD) and torch.equal(reference.picture, near[:1])
    asked = torch.stack([torch.full((4, 8, 8), value) for value in (0.9, 1.1)])
    assert reference.agreeing(asked).tolist() == [True, False]


def test_without_ordinary_captions_the_empty_prompt_says_what_is_usual(searched):
    probe, conds, _, sampler = searched
    asked = replace(sampler, ordinary=(), forwards=0)
    judge = escalation._Judge(asked, (4, 16, 16), 20)
    _, (reference,) = judge.begin(conds[:1])
    assert reference.picture is not None and judge.unrelated == [sampler.empty] * UNRELATED


def test_what_cures_at_too_high_a_cost_is_replaced_by_fewer_neurons(searched):
    """Before, all of them were weakened, which brought the copies back."""
    plain, _ = dosed(searched, cured_at=0.3, full_at=0.3)
    assert [p.dose.factor for p in plain.curve.points] == [0.0] and plain.verdict == "cured"
    dear = {"cured_at": 0.3, "full_at": 0.3, "moving": Memorizing.moving * 1.2 * MOST_COST / plain.curve.chosen.cost}
    result, _ = dosed(searched, **dear)
    (first, second) = result.curve.points
    assert not first.affordable and second.affordable and result.verdict == "cured"
    assert second.dose.factor == PART_FACTORS[0] and second.dose.count < first.dose.count
    assert result.neurons("").factor == second.dose.factor
    deviations = {(r["address"], r["index"]): r["deviations"] for r in result.held}
    kept = {(address, n) for address, indices in second.dose.neurons.items() for n in indices}
    assert min(deviations[key] for key in kept) >= max(v for key, v in deviations.items() if key not in kept)


def test_a_dose_that_is_too_strong_is_weakened_where_none_of_fewer_neurons_is_left():
    ladder = [Dose(f"found, factor {f:g}", {"a": range(8)}, f) for f in FACTORS]
    ladder += [Dose(f"a part, factor {f:g}", {"a": range(2)}, f) for f in PART_FACTORS]
    ladder += [Dose(f"all, factor {f:g}", {"a": range(9)}, f) for f in FACTORS]

    def tried(copies, dose, cost=0.1):
        return replace(point(copies, cost), dose=dose)

    start = [tried(0, ladder[0], 0.3)]
    assert curve_of().following(ladder) is ladder[0]
    assert curve_of(tried(3, ladder[0])).following(ladder) is ladder[1]
    assert curve_of(*start).following(ladder) is ladder[3], "fewer neurons"
    assert curve_of(*start, tried(1, ladder[3])).following(ladder) is ladder[4]
    assert curve_of(*start, tried(1, ladder[3]), tried(1, ladder[4])).following(ladder) is None, "all others cost more"
    weaker = curve_of(*start, tried(0, ladder[3], 0.208)).following(ladder)
    assert weaker.factor == pytest.approx(-0.9) and weaker.name == "a part, factor -0.9"
    again = curve_of(*start, tried(0, ladder[3], 0.208), tried(0, weaker, 0.204)).following(ladder)
    assert again.factor == pytest.approx(weaker.factor + STEP), "a step more where it still costs too much"
    far = curve_of(*[tried(3, dose) for dose in ladder[:4]], tried(0, ladder[4], 0.3))
    assert far.following(ladder) is ladder[5], "more neurons, but at a larger factor"
    affordable = tried(1, weaker, 0.19)
    assert curve_of(*start, tried(0, ladder[3], 0.208), affordable).following(ladder) is None
    assert curve_of(*[tried(3, dose) for dose in ladder]).following(ladder) is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fails", "verdict"), [("few steps", "not cured"), ("full", "not cured"), ("", "cured")], ids=lambda v: v or "none"
)
def test_doses_take_at_most_twice_the_evaluations_of_the_search(searched, fails, verdict):
    """Each row that goes through the network is counted: where every dose fails, at once or in full samples, and where
    the first one holds.

    After a short search there is room for five doses all the same.
    """
    probe, conds, statistics, fake = searched
    probe, counted = replace(probe, config=ProbeConfig(seeds=24)), []
    handle = probe.denoiser.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(len(args[0] if args else kwargs["sample"])), with_kwargs=True
    )
    agreeing = replace(fake.threshold, distance=1e3)
    real = FewStepSampler(probe.denoiser, empty=conds[-1], sites=fake.sites, threshold=agreeing, ordinary=conds[1:3])
    sampler = replace(fake, forwards=0, cured_at=0.3, full_at=-9.0 if fails else 0.3)
    sampler = real if fails == "few steps" else sampler
    config = SearchConfig(tau=0.01, effect_fraction=0.5, theta=1.5, theta_step=0.25, mode="chain")

    def rows(judge):
        counted.clear()
        (result,) = find_neurons(probe, ["a"], conds[:1], statistics, (4, 16, 16), config, sampler=judge)
        return sum(counted) + (sampler.forwards if judge and judge is not real else 0), result

    try:
        (before, _), (after, result) = rows(None), rows(sampler)
    finally:
        handle.remove()
    judge = escalation._Judge(fake, (4, 16, 16), 20)
    least = judge.first_rows(1) + 5 * judge.dose_rows + judge.full_rows + 4 * FULL[0] * judge.full_each
    assert result.verdict == verdict and before < after <= before + max(DOSES * before, least)
    doses = doses_of(probe.denoiser.backbone, fake.sites, result.search, result.held)
    assert len(result.curve.points) < len(doses) or fails == "few steps", "these are cheap"
    assert bool(result.curve.chosen.full) is (fails != "few steps")


def test_where_no_dose_holds_it_says_so(searched):
    result, _ = dosed(searched, cured_at=-9.0)
    names = [p.dose.name for p in result.curve.points]
    assert names[:3] == ["found neurons, factor 0", "a quarter of them, factor -1", "found neurons, factor -0.1"]
    assert names[-1] == "all of down and mid, factor 0" and result.verdict == "not cured"
    assert result.curve.chosen is result.curve.points[0], "the cheapest of those that do nothing"


def test_ordinary_prompts_are_not_escalated(searched):
    result, _ = dosed(searched, cured_at=1.5, full_at=1.5)
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
