"""Our guider for control before core's model patches and our own nodes: core's order of prompts is kept."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.control import GammaConfig, GuidanceConfig
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine_tests.comfy.controlled import NEGATIVE, NEVER, POSITIVE, TOLD, close, seeded, xl_twins
from vitrine_tests.comfy.guided_graphs import GUIDERS, PATCHES, blocked_by_text, patched
from vitrine_tests.lanes import nightly_but


@pytest.fixture(scope="module")
def scene(comfy):
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted

    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model = weighted(xl_twins().model, GammaConfig())
    neurons = NeuronSet({site.address: (0, 3, 5) for site in value_sites(model.model.diffusion_model, "all")[:2]})
    return model, with_sizes(POSITIVE, TOLD, (64, 64)), neurons


def guided(guider, steps=4, side=8):
    from comfy import sample, samplers

    sigmas = samplers.KSampler(guider.model_patcher, steps, "cpu", "euler", "ddim_uniform").sigmas
    latent = torch.zeros(1, 4, side, side)
    with torch.inference_mode():
        noise = sample.prepare_noise(latent, 3)
        return guider.sample(noise, latent, samplers.sampler_object("euler"), sigmas, seed=3).clone()


def core(model, positive, scale):
    from comfy import samplers

    guider = samplers.CFGGuider(model)
    guider.set_conds(positive, NEGATIVE)
    guider.set_cfg(scale)
    return guider


def ours(model, positive, scale, size_guidance=1.0, **more):
    from vitrine.nodes.comfy.control_guider import ControlGuider

    return ControlGuider(model, positive, NEGATIVE, GuidanceConfig(scale, size_guidance, **more))


@pytest.mark.parametrize("name", nightly_but(GUIDERS, ["DualCFGGuider", "areas"]))
def test_sizes_are_weighted_behind_a_guider(scene, name):
    """Of each conditioning: at weight 1 they are those that it carries, at weight 0 the picture's own."""
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted

    plain, make = xl_twins().model, GUIDERS[name][0]
    roles = enumerate(("positive", "negative", "middle", "second"))
    prompts = {k: [[seeded(1, 7, 24, seed=i), {"pooled_output": seeded(1, 20, seed=10 + i)}]] for i, k in roles}
    run, size = (lambda model, conds: guided(make(model, conds), 2, 16)), (128, 128)
    sized = {k: with_sizes(v, TOLD, size) for k, v in prompts.items()}
    neutral = {k: with_sizes(v, replace(TOLD, original=size), size) for k, v in prompts.items()}
    whole, none = (run(plain, conds) for conds in (sized, neutral))
    assert close(run(weighted(plain, GammaConfig("step", step_at=0.99)), sized), whole)
    assert close(run(weighted(plain, NEVER), sized), none)
    assert not close(whole, none)


SCALED = [(patch, scale) for patch in PATCHES for scale in (1.0, 3.0)]
DAILY = [(p, 3.0) for p in ("PerturbedAttentionGuidance", "SelfAttentionGuidance", "NAGuidance", "EasyCache")]
"""The others by day in test_guiders_obey.py, on a network of blocks."""


@pytest.mark.parametrize(("patch", "scale"), nightly_but(SCALED, DAILY))
def test_without_control_guidance_a_patch_does_what_it_does_behind_core(comfy, scene, patch, scale):
    model, positive, _ = scene
    caches = {"reuse_threshold": 1.0, "start_percent": 0.0, "end_percent": 1.0} if "Cache" in patch else {}
    with_patch = patched(comfy, patch, model, **caches)
    found, expected = (guided(make(with_patch, positive, scale), 8 if caches else 4) for make in (ours, core))
    assert close(found, expected)
    assert not caches or not torch.equal(found, guided(ours(model, positive, scale), 8)), "no step was skipped"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"size_guidance": 1.375},
        {"nesting": "semantic_inner", "size_guidance": 1.375},
        {"negative_sizes": "positive", "size_guidance": 1.375},
        {"scale": 1.0, "size_guidance": 1.375},
    ],
    ids=str,
)
def test_a_blocker_and_a_tap_find_the_prompt(comfy, scene, config):
    model, positive, neurons = scene
    settings = {"scale": 3.0} | config
    told = {"factor": 0.0, "branch": "cond", "start_percent": 0.0, "end_percent": 1.0}
    blocked = comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **told)[0]
    found = guided(ours(blocked, positive, **settings))
    assert torch.equal(found, guided(ours(blocked_by_text(model, positive[0][0], neurons), positive, **settings)))
    assert not torch.equal(found, guided(ours(model, positive, **settings)))
    site = value_sites(model.model.diffusion_model, "all")[0]
    tapped, recorder = comfy.call("VitrineTapDuringSampling", model=model, layers=site.address, record_steps="all")
    assert torch.equal(guided(ours(tapped, positive, **settings)), guided(ours(model, positive, **settings)))
    values = model.model.diffusion_model.get_submodule(site.path)
    for step in recorder.record:
        halves = recorder.record[step]
        assert {"cond"} <= set(halves) <= {"cond", "uncond", "null", "controlled_negative"}
        for half, text in (("cond", positive), ("uncond", NEGATIVE), ("null", positive)):
            if half in halves:
                assert torch.allclose(halves[half][site.address].tensor, values(text[0][0]), atol=1e-5)


def test_where_control_has_no_weight_the_null_is_the_prompt(comfy, scene):
    """Early steps evaluate the prompt without control alone: it is recorded as the prompt, and patches find it."""
    from vitrine.engine.control import SizeCondition
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted

    told = with_sizes(POSITIVE, SizeCondition((16, 24), (0, 0), (64, 64)), (64, 64))
    model = weighted(xl_twins().model, GammaConfig("power_cos", 8.0))
    tapped, recorder = comfy.call("VitrineTapDuringSampling", model=model, layers="mid-vit-out", record_steps="all")
    guider = ours(tapped, told, 3.0, 1.375)
    guided(guider, 8)
    assert {s.evaluations for s in guider.log} == {2, 3}
    for step, logged in zip(recorder.record, guider.log, strict=True):
        assert set(recorder.record[step]) == (
            {"cond", "uncond"} if logged.evaluations == 2 else {"cond", "uncond", "null"}
        )
