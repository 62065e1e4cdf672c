"""Guidance of control in real ComfyUI: Eq. 2 is its dual guidance, evaluations are spared and counted."""

import pytest
import torch
from vitrine.engine.control import (
    GammaConfig,
    GuidanceConfig,
)
from vitrine_tests.comfy.controlled import NEGATIVE, NESTED, POSITIVE, TOLD, close, latent, node, xl_twins


@pytest.fixture(scope="module")
def xl(comfy):
    return xl_twins()


def guided(guider, scheduler="ddim_uniform", steps=4):
    from comfy import sample, samplers

    sigmas = samplers.KSampler(guider.model_patcher, steps, "cpu", "euler", scheduler).sigmas
    noise = sample.prepare_noise(latent()["samples"], 3)
    with torch.inference_mode():
        return guider.sample(noise, latent()["samples"], samplers.sampler_object("euler"), sigmas, seed=3).clone()


def test_equation_two_is_comfyuis_dual_guidance(xl):
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive = weighted(xl.model, GammaConfig()), with_sizes(POSITIVE, TOLD, (64, 64))
    found = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375)))
    for nested, cfg1 in ((True, 1.375), (False, 3.0 * 1.375)):
        dual = Guider_DualCFG(model)
        dual.set_conds(positive, POSITIVE, NEGATIVE)
        dual.set_cfg(cfg1, 3.0, nested)
        assert close(found, guided(dual)), nested
    inner = ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375, "semantic_inner"))
    dual = Guider_DualCFG(model)
    dual.set_conds(positive, with_sizes(NEGATIVE, TOLD, (64, 64)), NEGATIVE)
    dual.set_cfg(1.375, 3.0, True)
    assert close(guided(inner), guided(dual))


def test_without_control_guidance_it_is_ksampler(comfy, xl):
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive = weighted(xl.model, GammaConfig()), with_sizes(POSITIVE, TOLD, (64, 64))
    for scale in (3.0, 1.0):
        with torch.inference_mode():
            sampler = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
            (core,) = sampler.sample(model, 3, 4, scale, "euler", "ddim_uniform", positive, NEGATIVE, latent(), 1.0)
            found = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(scale)))
            assert close(found, core["samples"])


def test_evaluations_are_spared_and_counted(comfy, xl):
    sizes = {"width": 24, "height": 16, "crop_left": 0, "crop_top": 0}
    _, report = node(comfy, xl, **NESTED, **sizes, alpha=8.0, steps=20, scheduler="normal")
    counts = [int(line.split()[-1]) for line in report.splitlines()[2:]]
    weights = GammaConfig(alpha=8.0).at(torch.tensor([float(line.split()[1]) for line in report.splitlines()[2:]]))
    weights = weights.tolist()
    assert counts == [2 if w < 1e-4 else 3 for w in weights] and 2 in counts and 3 in counts
    assert weights == sorted(weights) and weights[0] < 1e-5 and weights[-1] > 0.99
    _, cropped = node(comfy, xl, **NESTED, alpha=8.0, steps=20, scheduler="normal")
    assert "60 evaluations" in cropped
    _, plain = node(comfy, xl, cfg=1.0)
    assert "4 evaluations" in plain


def test_patches_of_guidance_still_act(xl):
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control import weighted
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive, seen = weighted(xl.model, GammaConfig()), with_sizes(POSITIVE, TOLD, (64, 64)), []
    plain = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375)))
    patched = model.clone()
    patched.set_model_sampler_post_cfg_function(lambda args: seen.append(args["cond_scale"]) or args["denoised"] * 0.5)
    patched.set_model_sampler_pre_cfg_function(lambda args: seen.append(len(args["conds_out"])) or args["conds_out"])
    assert not close(plain, guided(ControlGuider(patched, positive, NEGATIVE, GuidanceConfig(3.0, 1.375))))
    assert sorted(seen) == [2] * 4 + [3.0] * 4
    forced = model.clone()
    forced.model_options["disable_cfg1_optimization"] = True
    guider = ControlGuider(forced, positive, NEGATIVE, GuidanceConfig())
    guided(guider)
    assert [s.evaluations for s in guider.log] == [2] * 4


def test_guidance_grows_with_the_resolution(comfy, xl):
    law, report = node(comfy, xl, cfg=1.5, upscale=2.0)
    assert torch.equal(law, node(comfy, xl, cfg=2.0)[0]) and "guidance 2\n" in report
