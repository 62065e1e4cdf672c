"""Guidance of control in real ComfyUI: Eq. 2 is its dual guidance, evaluations are spared and counted."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.control import GammaConfig, GuidanceConfig
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.controlled import (
    NEGATIVE,
    NESTED,
    NO_POOLED,
    NO_TEXT,
    POOLED,
    POSITIVE,
    TEXT,
    TOLD,
    close,
    latent,
    node,
    pipeline,
    xl_twins,
)


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
            call = (3, 4, scale, "euler", "ddim_uniform", positive, NEGATIVE, latent(), 1.0)
            (core,), (bare,) = sampler.sample(model, *call), sampler.sample(xl.model, *call)
            assert not close(bare["samples"], core["samples"]), "the curve has an effect"
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


@pytest.mark.parametrize("negative", ["picture", "positive"])
def test_both_doors_tell_the_negative_one_size(comfy, xl, negative):
    """picture is what ComfyUI's KSampler does, positive what diffusers' SDXL pipeline does: both stock, no curve."""
    from diffusers import StableDiffusionXLPipeline
    from vitrine.nodes.comfy.conditioning import with_sizes

    found, _ = node(comfy, xl, form="constant", negative_sizes=negative)
    config = GuidanceConfig(3.0, negative_sizes=negative)
    assert close(found, pipeline(xl, GammaConfig("constant"), config).images)
    stock = StableDiffusionXLPipeline(**xl.pipe.components)
    stock.set_progress_bar_config(disable=True)
    own, told = (64, 64), {"original_size": TOLD.original, "crops_coords_top_left": TOLD.crop, "target_size": (64, 64)}
    if negative == "picture":
        told |= {"negative_original_size": own, "negative_target_size": own}
    embeds = {"prompt_embeds": TEXT, "negative_prompt_embeds": NO_TEXT}
    embeds |= {"pooled_prompt_embeds": POOLED, "negative_pooled_prompt_embeds": NO_POOLED}
    noise = torch.randn(1, 4, 8, 8, generator=torch.manual_seed(3))
    xl.pipe.scheduler.set_timesteps(4)
    noise = noise * xl.pipe.scheduler.sigmas[0] / xl.pipe.scheduler.init_noise_sigma
    how = {"num_inference_steps": 4, "output_type": "latent", "guidance_scale": 3.0, "height": 64, "width": 64}
    assert close(found, stock(latents=noise, **how, **told, **embeds).images)
    if negative == "picture":
        with torch.inference_mode():
            positive = with_sizes(POSITIVE, replace(TOLD, target=own), own)
            call = (xl.model, 3, 4, 3.0, "euler", "ddim_uniform", positive, NEGATIVE, latent(), 1.0)
            (core,) = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]().sample(*call)
        assert close(found, core["samples"] * xl.scale)
    else:
        other, _ = node(comfy, xl, form="constant")
        assert not close(found, other)


@pytest.mark.parametrize("alpha", [1.0, 8.0])
def test_the_positives_sizes_for_the_negative_under_equation_two(comfy, xl, alpha):
    """With a curve, control guidance and steps whose control has no weight, both doors still agree."""
    how = {"size_guidance": 1.375, "negative_sizes": "positive", "alpha": alpha, "crop_left": 0, "crop_top": 0}
    found, report = node(comfy, xl, **how)
    config = GuidanceConfig(3.0, 1.375, negative_sizes="positive")
    ours = pipeline(xl, GammaConfig(alpha=alpha), config, replace(TOLD, crop=(0, 0)))
    assert not close(found, node(comfy, xl, **how | {"negative_sizes": "picture"})[0]), "the switch has an effect"
    assert close(found, ours.images)
    assert report.splitlines()[1] == f"{sum(s.evaluations for s in ours.log)} evaluations"


def test_an_unknown_switch_is_refused():
    with pytest.raises(VitrineError, match="picture"):
        GuidanceConfig(3.0, negative_sizes="both")


def test_control_values_refuse_a_model_that_is_told_no_sizes(comfy, xl):
    told = {"width": 64, "height": 64, "crop_left": 0, "crop_top": 0, "target_width": 64, "target_height": 64}
    for name in ("portraits, 64 px", "flow portraits, 128 px"):
        model = comfy.call("VitrineLoadPortraits", model=name)[0]
        with pytest.raises(VitrineError, match="other models take no sizes"):
            comfy.call("VitrineControlValues", conditioning=POSITIVE, model=model, **told)
    plain = comfy.call("VitrineControlValues", conditioning=POSITIVE, **told)[0]
    seen = comfy.call("VitrineControlValues", conditioning=POSITIVE, model=xl.model, **told)[0]
    assert seen[0][1] == plain[0][1]
    transformer = comfy.call("VitrineLoadPortraitsTransformer", weight="power-cosine")[0]
    controlled = comfy.call("VitrineLoadControl", model=transformer, file="portraits power-cosine")[0]
    comfy.call("VitrineControlValues", conditioning=POSITIVE, model=controlled, **told)
