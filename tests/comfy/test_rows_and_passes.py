"""Whose rows these are, and which pass of several: core's guiders and model patches before our nodes."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet
from vitrine_tests.comfy.guided_graphs import (
    GUIDERS,
    MIDDLE,
    NEURONS,
    PATCHES,
    VALUES,
    blocked_by_text,
    cfg,
    dual_model,
    encoded,
    patched,
    sampled,
    told,
    values_of,
)
from vitrine_tests.lanes import nightly_but


@pytest.fixture(scope="module")
def scene(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    return model, encoded(clip)


def tapped(comfy, model, steps="all"):
    return comfy.call("VitrineTapDuringSampling", model=model, layers=f"{VALUES} {MIDDLE}", record_steps=steps)


def blocker(comfy, model, **settings):
    told = {"neurons": NEURONS, "factor": 0.0, "branch": "cond", "start_percent": 0.0, "end_percent": 1.0} | settings
    return comfy.call("VitrineNEMONeuronBlocker", model=model, **told)[0]


ONE, OTHER = list(GUIDERS)[::2], list(GUIDERS)[1::2]
"""By day each guider is behind a tap or a blocker; at night behind both and a late model."""


@pytest.mark.parametrize("name", nightly_but(GUIDERS, ONE))
def test_a_tap_behind_a_guider(comfy, scene, name):
    """Each half has the values of its own text, and the picture is the untapped one, bit for bit."""
    model, conds = scene
    make, halves = GUIDERS[name]
    watched, recorder = tapped(comfy, model)
    assert torch.equal(sampled(make(watched, conds)), sampled(make(model, conds)))
    first = recorder.record[0]
    assert set(first) == set(halves)
    for half, text in halves.items():
        expected = values_of(model, conds[text][0][0])
        if name == "hooks" and half == "cond":
            assert not torch.allclose(first[half][VALUES].tensor, expected, atol=1e-3)  # its LoRA is on
        else:
            assert torch.allclose(first[half][VALUES].tensor, expected, atol=1e-5), half


@pytest.mark.parametrize("name", nightly_but(GUIDERS, OTHER))
def test_a_blocker_behind_a_guider(comfy, scene, name):
    """``cond`` blocks the rows of the positive texts and no others, as found by looking at the texts."""
    model, conds = scene
    make, _ = GUIDERS[name]
    found = sampled(make(blocker(comfy, model), conds))
    expected = blocked_by_text(model, conds["positive"][0][0])
    if name in ("masks", "areas", "timestep ranges"):
        expected = blocked_by_text(expected, conds["second"][0][0])
    assert torch.equal(found, sampled(make(expected, conds)))
    assert not torch.equal(found, sampled(make(model, conds)))


def check_a_late_model(comfy, scene, make):
    """From the beginning on it is the later model; before its time it is nothing."""
    model, conds = scene
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    draw = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    one, other = (comfy.call("VitrineW2WSample", space=space, seed=seed, **draw)[0] for seed in (1, 2))

    def applied(**late):
        told = {"space": space, "w2w_model": one, "strength": 1.0, "start_timestep": 1000.0} | late
        return comfy.call("VitrineApplyW2WModel", model=model, **told)[0]

    late = sampled(make(applied(late_model=other, start_timestep=999.5), conds))
    assert torch.allclose(late, sampled(make(applied(late_model=other, start_timestep=1000.0), conds)), atol=1e-3)
    assert not torch.allclose(late, sampled(make(applied(), conds)), atol=1e-2)


@pytest.mark.parametrize("name", nightly_but(GUIDERS, ["PerpNegGuider", "hooks", "areas"]))
def test_a_late_model_behind_a_guider(comfy, scene, name):
    check_a_late_model(comfy, scene, GUIDERS[name][0])


@pytest.mark.parametrize("patch", nightly_but(PATCHES, ["PerturbedAttentionGuidance", "APG"]))
def test_a_late_model_behind_a_patch(comfy, scene, patch):
    check_a_late_model(comfy, scene, lambda model, conds: cfg(patched(comfy, patch, model), conds))


SCALED = [(patch, scale) for patch in PATCHES for scale in (1.0, 3.0)]
DAILY = ("PerturbedAttentionGuidance", "NAGuidance", "SkipLayerGuidanceDiTSimple", "EasyCache")
"""Each in a way of its own: one more pass, other attention, a pass with blocks left out, steps left out."""


@pytest.mark.parametrize(("patch", "scale"), nightly_but(SCALED, [*((p, 3.0) for p in DAILY), (DAILY[0], 1.0)]))
def test_a_tap_and_a_blocker_behind_a_patch(comfy, scene, patch, scale):
    """The pass that guidance starts from is kept, not the perturbed one; the run is the same, bit for bit."""
    model, conds = scene
    with_patch = patched(comfy, patch, model)
    watched, recorder = tapped(comfy, with_patch)
    assert torch.equal(sampled(cfg(watched, conds, scale)), sampled(cfg(with_patch, conds, scale)))
    plain, expected = tapped(comfy, model)
    sampled(cfg(plain, conds, scale))
    for half, taps in recorder.record[0].items():
        for place in (VALUES, MIDDLE):
            found = taps[place].tensor
            assert patch == "NAGuidance" or torch.allclose(
                found, expected.record[0].get(half, taps)[place].tensor, atol=1e-4
            )
    assert "cond" in recorder.record[0]
    assert torch.allclose(
        recorder.record[0]["cond"][VALUES].tensor, values_of(model, conds["positive"][0][0]), atol=1e-5
    )
    found = sampled(cfg(blocker(comfy, with_patch), conds, scale))
    assert torch.equal(found, sampled(cfg(blocked_by_text(with_patch, conds["positive"][0][0]), conds, scale)))


def test_another_network_is_left_alone(comfy, scene):
    """The negative's model of Dual Model CFG runs with this clone's options: nothing of ours is on it."""
    model, conds = scene
    other, _, _ = comfy.call("VitrineLoadPortraits")
    assert other.model is not model.model
    watched, recorder = tapped(comfy, model)
    make = lambda m: dual_model(m, conds, other)  # noqa: E731
    assert torch.equal(sampled(make(watched)), sampled(make(model)))
    assert set(recorder.record[0]) == {"cond"}
    both = sampled(make(blocker(comfy, model, branch="both")))
    assert torch.equal(both, sampled(make(blocked_by_text(model, conds["positive"][0][0]))))


def test_nodes_on_the_second_of_two_models_are_refused(comfy, scene):
    """Core runs it with the first one's options: they would not act."""
    model, conds = scene
    for other in (blocker(comfy, model, branch="both"), tapped(comfy, model)[0]):
        with pytest.raises(VitrineError, match="model"):
            sampled(dual_model(model, conds, other))
    sampled(cfg(blocker(comfy, model), conds))


def test_a_conditioning_of_a_patch_is_refused_for_one_branch(comfy, scene):
    """Core's old Perp-Neg keeps a prompt of its own, of which no guider says what it is."""
    model, conds = scene
    old = patched(comfy, "PerpNeg", model, empty_conditioning=conds["middle"], neg_scale=1.0)
    watched, recorder = tapped(comfy, old)
    assert torch.equal(sampled(cfg(watched, conds)), sampled(cfg(old, conds)))
    assert set(recorder.record[0]) == {"cond", "uncond", "other"}
    with pytest.raises(VitrineError, match="prompt's part of the batch"):
        sampled(cfg(blocker(comfy, old), conds))


def test_context_windows_are_not_recorded(comfy, scene):
    """Each window is a pass of its own: none of them is the step's."""
    model, conds = scene
    windows = patched(comfy, "ContextWindowsManual", model, context_length=8, context_overlap=2, dim=0)
    watched, recorder = tapped(comfy, windows)
    many = torch.zeros(18, 4, 16, 16)
    assert torch.equal(sampled(cfg(watched, conds), latent=many), sampled(cfg(windows, conds), latent=many))
    with pytest.raises(VitrineError, match="windows"):
        recorder.activations(0, "cond")


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "dpmpp_sde", "uni_pc", "sa_solver_pece"])
def test_samplers_of_second_order(comfy, scene, sampler):
    """A step's record is of its own level: of Heun's two evaluations there, the one that begins the step."""
    from comfy import samplers

    model, conds = scene
    watched, recorder = tapped(comfy, model)
    assert torch.equal(sampled(cfg(watched, conds), 4, sampler), sampled(cfg(model, conds), 4, sampler))
    sigmas = samplers.KSampler(model, 4, "cpu", sampler, "ddim_uniform").sigmas
    levels = [float(model.get_model_object("model_sampling").timestep(s)) for s in sigmas[:-1]]
    assert [recorder.record.timesteps[step] for step in recorder.record] == pytest.approx(
        levels[: len(recorder.record)]
    )
    assert list(recorder.record) == list(range(4))


def test_churn(comfy, scene):
    """Noise added before a step moves it off its level."""
    model, conds = scene
    watched, recorder = tapped(comfy, model)
    sampled(cfg(watched, conds), 4, options={"s_churn": 1.0})
    assert list(recorder.record) == list(range(4))


def test_two_prompts_by_their_number(comfy, scene):
    model, conds = scene
    make, _ = GUIDERS["masks"]
    watched, recorder = tapped(comfy, model)
    out = {"samples": sampled(make(watched, conds))}
    call = {"recorder": recorder, "latent": out, "step": 0}
    one, two = (comfy.call("VitrineCollectTaps", half="cond", part=n, **call)[0][VALUES].tensor for n in (1, 2))
    assert not torch.equal(one, two)
    with pytest.raises(VitrineError, match="part"):
        comfy.call("VitrineCollectTaps", half="cond", **call)
    assert comfy.call("VitrineCollectTaps", half="uncond", **call)[0][VALUES].tensor.shape == one.shape


def test_told_is_what_core_tells(scene):
    """The texts differ, or no test above says anything."""
    model, conds = scene
    texts = [conds[k][0][0] for k in conds]
    assert not any(torch.equal(a, b) for i, a in enumerate(texts) for b in texts[i + 1 :])
    assert told(conds["positive"], a=1)[0][1]["a"] == 1


def halves(apply, call):
    """A node that runs the batch in two pieces, without a word of it in the options."""
    kept = lambda v, part: part(v) if isinstance(v, torch.Tensor) and len(v) == len(call["input"]) else v  # noqa: E731
    outs = []
    for part in (lambda v: v[: len(v) // 2], lambda v: v[len(v) // 2 :]):
        conditions = {key: kept(value, part) for key, value in call["c"].items()}
        outs.append(apply(part(call["input"]), part(call["timestep"]), **conditions))
    return torch.cat(outs)


def tiles(apply, call):
    """A node that runs two tiles as one batch: all parts of the first tile, then all of the second."""
    rows = len(call["input"])
    twice = lambda v: torch.cat([v, v]) if isinstance(v, torch.Tensor) and len(v) == rows else v  # noqa: E731
    out = apply(*(twice(call[k]) for k in ("input", "timestep")), **{k: twice(v) for k, v in call["c"].items()})
    return out[:rows]


@pytest.mark.parametrize("wrapper", [halves, tiles])
def test_rows_that_a_node_has_rearranged_are_not_taken_for_the_passs(comfy, scene, wrapper):
    """Two pictures in two pieces: each piece divides by the two prompts, and has one of them only."""
    model, conds = scene
    pieces = model.clone()
    pieces.set_model_unet_function_wrapper(wrapper)
    two = torch.zeros(2, 4, 16, 16)
    plain = sampled(cfg(pieces, conds), latent=two)
    with pytest.raises(VitrineError, match="batch"):
        sampled(cfg(blocker(comfy, pieces), conds), latent=two)
    both = sampled(cfg(blocker(comfy, pieces, branch="both"), conds), latent=two)
    assert torch.allclose(both, sampled(cfg(blocker(comfy, model, branch="both"), conds), latent=two), atol=1e-3)
    watched, recorder = tapped(comfy, pieces)
    assert torch.equal(sampled(cfg(watched, conds), latent=two), plain)
    with pytest.raises(VitrineError, match="tiles"):
        recorder.activations(0, "cond")


def test_two_of_a_kind_add_up(comfy, scene):
    """Two blockers, two late models and two taps on one MODEL."""
    model, conds = scene
    half = NeuronSet({VALUES: tuple(range(20))})
    rest = NeuronSet({VALUES: tuple(range(20, 40))})
    one = blocker(comfy, model, neurons=half)
    found, alone = sampled(cfg(blocker(comfy, one, neurons=rest), conds)), sampled(cfg(one, conds))
    assert not torch.allclose(found, alone, atol=1e-4) and not torch.allclose(
        alone, sampled(cfg(model, conds)), atol=1e-4
    )
    assert torch.allclose(found, sampled(cfg(blocker(comfy, model), conds)), atol=1e-4)
    first, early = comfy.call("VitrineTapDuringSampling", model=one, layers=VALUES, record_steps="0")
    second, late = comfy.call("VitrineTapDuringSampling", model=first, layers=MIDDLE, record_steps="1")
    assert torch.equal(sampled(cfg(second, conds)), sampled(cfg(one, conds)))
    assert list(early.record) == [0] and list(late.record) == [1]
    assert set(early.record[0]["cond"]) == {VALUES} and set(late.record[1]["cond"]) == {MIDDLE}

    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    draw = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    one, other = (comfy.call("VitrineW2WSample", space=space, seed=seed, **draw)[0] for seed in (1, 2))
    told = {"space": space, "w2w_model": one, "late_model": other, "start_timestep": 999.5}
    twice = comfy.call("VitrineApplyW2WModel", model=model, strength=0.3, **told)[0]
    twice = comfy.call("VitrineApplyW2WModel", model=twice, strength=0.4, **told)[0]
    once = comfy.call("VitrineApplyW2WModel", model=model, strength=0.7, **told)[0]
    assert not torch.allclose(sampled(cfg(once, conds)), sampled(cfg(model, conds)), atol=1e-2)
    assert torch.allclose(sampled(cfg(twice, conds)), sampled(cfg(once, conds)), atol=1e-3)


@pytest.mark.parametrize("sampling", ["edm", "v_prediction"])
def test_a_timestep_of_a_model_without_timesteps_is_refused(comfy, scene, sampling):
    """EDM's network is told a logarithm near 0, which every ``start`` would be above."""
    model, conds = scene
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    draw = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    one, other = (comfy.call("VitrineW2WSample", space=space, seed=seed, **draw)[0] for seed in (1, 2))
    told = {"space": space, "w2w_model": one, "late_model": other, "start_timestep": 500.0, "strength": 1.0}
    late = comfy.call("VitrineApplyW2WModel", model=model, **told)[0]
    name = "ModelSamplingContinuousEDM" if sampling == "edm" else "ModelSamplingContinuousV"
    settings = {"sampling": sampling, "sigma_max": 80.0, "sigma_min": 0.01}
    with pytest.raises(VitrineError, match="timesteps"):
        sampled(cfg(patched(comfy, name, late, **settings), conds), scheduler="karras")
    blocking = patched(comfy, name, blocker(comfy, model, end_percent=0.5), **settings)
    sampled(cfg(blocking, conds), scheduler="karras")  # a share of the run needs none
