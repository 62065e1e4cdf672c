"""Control nodes in real ComfyUI: the doors agree, both ends are the model to the bit, and what is refused."""

import pytest
import torch
from vitrine.engine.control import (
    ControlCheckpoint,
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    control_width,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine_tests.comfy.controlled import (
    CURVE,
    FAR,
    NEGATIVE,
    NESTED,
    NEVER,
    POOLED,
    POSITIVE,
    TEXT,
    close,
    latent,
    node,
    pipeline,
    pixart_twins,
    seeded,
    xl_twins,
)


@pytest.fixture(scope="module")
def xl(comfy):
    return xl_twins()


@pytest.fixture(scope="module")
def pixart(comfy):
    return pixart_twins()


# --- the doors agree ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["xl", "pixart"])
@pytest.mark.parametrize("beta", [1.0, 1.375])
def test_node_and_pipeline_give_the_same_latents(comfy, request, family, beta, no_hooks_left):
    twins = request.getfixturevalue(family)
    theirs, report = node(comfy, twins, size_guidance=beta)
    ours = pipeline(twins, GammaConfig(), GuidanceConfig(3.0, beta))
    assert close(theirs, ours.images)
    no_hooks_left(twins.model.model.diffusion_model)
    lines = report.splitlines()[2:]
    assert len(lines) == 4 and report.splitlines()[1] == f"{sum(s.evaluations for s in ours.log)} evaluations"
    for line, step in zip(lines, ours.log, strict=True):
        assert f"t {step.t:6.1f}  sigma {step.sigma:8.4f}" in line and f"gamma {step.gamma:.4f}" in line


@pytest.mark.parametrize("reference", ["zeros", "size below"])
@pytest.mark.parametrize(("family", "form"), [("xl", "power_cos"), ("xl", "constant"), ("pixart", "power_cos")])
def test_other_neutral_sizes_agree_too(comfy, request, family, form, reference):
    twins = request.getfixturevalue(family)
    theirs, _ = node(
        comfy, twins, size_guidance=1.5, reference=reference, nesting="semantic_inner", alpha=0.5, form=form
    )
    neutral, curve = {"zeros": "zeros"}.get(reference, (40, 48)), GammaConfig(form, 0.5)
    guidance = GuidanceConfig(3.0, 1.5, "semantic_inner")
    assert close(theirs, pipeline(twins, curve, guidance, reference=neutral).images)
    assert not close(theirs, pipeline(twins, curve, guidance).images)


def test_the_parts_in_a_row_are_the_sampler(comfy, xl):
    from comfy import sample, samplers

    (model,) = comfy.call("VitrineApplyGammaSchedule", model=xl.model, **CURVE)
    (positive,) = comfy.call("VitrineControlValues", conditioning=POSITIVE, target_width=64, target_height=64, **FAR)
    assert "width" not in POSITIVE[0][1] and positive[0][1]["height"] == 16
    (guider,) = comfy.call("VitrineControlCFGGuider", model=model, positive=positive, negative=NEGATIVE, **NESTED)
    sigmas = samplers.KSampler(model, 4, "cpu", "euler", "ddim_uniform").sigmas
    noise = sample.prepare_noise(latent()["samples"], 3)
    with torch.inference_mode():
        made = guider.sample(noise, latent()["samples"], samplers.sampler_object("euler"), sigmas, seed=3).clone()
    whole, _ = node(comfy, xl, size_guidance=1.375)
    assert not close(whole, node(comfy, xl)[0]), "control guidance has an effect"
    assert torch.equal(made * xl.scale, whole)
    assert [s.evaluations for s in guider.log] == [3] * 4


# --- the two ends, to the bit ---------------------------------------------------------------------------------------
def vector(model, **sizes):
    return model.model.encode_adm(pooled_output=POOLED, **{"width": 64, "height": 64} | sizes)


SMALL = {"width": 24, "height": 16, "crop_w": 4, "crop_h": 8, "target_width": 64, "target_height": 64}


def call(model, y, t=500.0):
    """The network's x0 for rows of y, at one timestep or one for each."""
    from vitrine.nodes.comfy.model import denoiser_of

    with torch.inference_mode():
        denoiser = denoiser_of(model)
        t = torch.as_tensor(t).expand(len(y))
        cond = Condition(TEXT.expand(len(y), -1, -1), None, {"y": y})
        return denoiser.call(seeded(1, 4, 8, 8, seed=9).expand(len(y), -1, -1, -1), t, cond).clone()


def test_both_ends_are_the_untouched_model_to_the_bit(comfy, xl):
    from vitrine.nodes.comfy.control import weighted

    told = vector(xl.model, **SMALL)
    neutral = vector(xl.model, **SMALL | {"width": 64, "height": 64})
    full, low = call(xl.model, told), call(xl.model, neutral)
    always, never = weighted(xl.model, GammaConfig("step", step_at=0.99)), weighted(xl.model, NEVER)
    assert not torch.equal(full, low)
    assert torch.equal(call(always, told), full) and torch.equal(call(never, told), low)
    other = vector(xl.model, **SMALL | {"width": 48, "height": 40})
    assert torch.equal(call(weighted(xl.model, NEVER, (40, 48)), told), call(xl.model, other))
    half = weighted(xl.model, GammaConfig())
    assert not torch.equal(call(half, told), full) and torch.equal(call(half, neutral), low)
    assert torch.equal(call(xl.model, told), full), "the sibling branch never sees it"
    constant = comfy.call("VitrineApplyGammaSchedule", model=xl.model, **CURVE | {"form": "constant"})[0]
    assert constant is xl.model
    again = weighted(weighted(xl.model, NEVER), GammaConfig("constant"))
    assert torch.equal(call(again, told), full), "the last one counts"


def test_a_drawn_curve_takes_the_place_of_the_form(comfy, xl):
    from vitrine.nodes.comfy.control import weighted

    told, (drawn,) = (
        vector(xl.model, **SMALL),
        comfy.call(
            "VitrineApplyGammaSchedule", model=xl.model, **CURVE | {"form": "constant", "points": " 0:0, 0.5:0.2, 1:1 "}
        ),
    )
    same = weighted(xl.model, GammaConfig("drawn", points="0:0, 0.5:0.2, 1:1"))
    assert torch.equal(call(drawn, told), call(same, told))
    assert not torch.equal(call(drawn, told), call(weighted(xl.model, GammaConfig("linear")), told))
    with pytest.raises(VitrineError, match="0:0, 0.5:0.2, 1:1 is a curve"):
        comfy.call("VitrineApplyGammaSchedule", model=xl.model, **CURVE | {"points": "up"})


@pytest.mark.parametrize("t", [100.0, 500.0, 800.0])
def test_the_middle_is_the_formula_also_with_a_lora(xl, t):
    from vitrine.nodes.comfy.control import weighted

    name = "diffusion_model.label_emb.0.{}.weight"
    change = {name.format(i): (0.3 * seeded(128, n, seed=i),) for i, n in ((0, 1556), (2, 128))}
    with_lora, curve = xl.model.clone(), GammaConfig(alpha=2.0)
    assert len(with_lora.add_patches(change, 1.0)) == 2
    told = vector(xl.model, **SMALL)
    neutral = vector(xl.model, **SMALL | {"width": 64, "height": 64})
    found = call(weighted(with_lora, curve), told, t)
    label = xl.model.model.diffusion_model.label_emb
    by_hand = with_lora.clone()

    def patch(emb, channels, options):
        full, low = label(told), label(neutral)
        return emb + (low + float(curve.at(t)) * (full - low)) - full

    by_hand.set_model_emb_patch(patch)
    assert torch.allclose(found, call(by_hand, told, t), atol=1e-4 * float(found.abs().max()))
    assert not torch.allclose(found, call(weighted(xl.model, curve), told, t), atol=1e-2)
    assert torch.equal(call(with_lora, told, t), call(with_lora.clone(), told, t))


def test_pixarts_ends_are_the_untouched_model_to_the_bit(pixart, no_hooks_left):
    from vitrine.nodes.comfy.control import weighted
    from vitrine.nodes.comfy.model import denoiser_of

    def predict(model, size):
        told = {"c_size": torch.tensor([size]), "c_ar": torch.tensor([[1.0]])}
        with torch.inference_mode():
            x = seeded(1, 4, 64, 64, seed=9)
            return denoiser_of(model).call(x, torch.tensor([500.0]), Condition(TEXT, None, told)).clone()

    full, low = predict(pixart.model, (16.0, 24.0)), predict(pixart.model, (512.0, 512.0))
    assert not torch.equal(full, low)
    assert torch.equal(predict(weighted(pixart.model, GammaConfig("step", step_at=0.99)), (16.0, 24.0)), full)
    assert torch.equal(predict(weighted(pixart.model, NEVER), (16.0, 24.0)), low)
    other = predict(weighted(pixart.model, NEVER, (40, 48)), (16.0, 24.0))
    assert torch.equal(other, predict(pixart.model, (40.0, 48.0)))
    half = predict(weighted(pixart.model, GammaConfig()), (16.0, 24.0))
    assert not torch.equal(half, full) and not torch.equal(half, low)
    no_hooks_left(pixart.model.model.diffusion_model)


# --- refusals -------------------------------------------------------------------------------------------------------
def test_models_that_cannot_be_weighted_are_refused(comfy, xl):
    from comfy import model_sampling
    from vitrine.nodes.comfy.control import weighted, with_checkpoint

    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(xl.pipe.unet))
    own = ControlCheckpoint(made, ControlMetadata("UNet2DConditionModel", made.dim), {})
    with pytest.raises(ValueError, match="part of what was trained"):
        comfy.call("VitrineApplyGammaSchedule", model=with_checkpoint(xl.model, own), **CURVE)

    class EDM(model_sampling.ModelSamplingContinuousEDM, model_sampling.EDM):
        pass

    model = xl.model.clone()
    model.add_object_patch("model_sampling", EDM(xl.model.model.model_config))
    with pytest.raises(ValueError, match="timesteps of 1000"):
        weighted(model, GammaConfig())


def test_control_values_say_what_reads_them(comfy):
    """On SD 1.5 they change nothing without a checkpoint, and nothing said so."""
    values = {"width": 64, "height": 64, "crop_left": 0, "crop_top": 0, "target_width": 64, "target_height": 64}
    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineControlValues"]
    for width, said in ((768, "change nothing"), (1024, "change nothing"), (2048, "SDXL and PixArt read")):
        shown = node.execute(conditioning=[[torch.zeros(1, 77, width), {}]], **values).ui
        assert said in str(shown.as_dict())


def test_lcm_sampling_keeps_the_networks_timesteps(comfy):
    """ModelSamplingDiscrete(lcm) has 50 rows; timesteps 999 and 50 were refused."""
    import comfy_extras.nodes_model_advanced as advanced

    model, _, _ = comfy.call("VitrineLoadPortraits")
    (lcm,) = advanced.ModelSamplingDiscrete().patch(model, "lcm", False)
    sampling = lcm.get_model_object("model_sampling")
    schedule = own_schedule(lcm)
    for t in (19.0, 499.0, 999.0):
        sigma = schedule.sigma(t)
        assert float(sampling.timestep(sigma.float())) == t
        assert abs(float(schedule.timestep(sigma)) - t) < 1e-6
    assert schedule.sigma(50.0) > schedule.sigma(39.0)


def own_schedule(model):
    import sys

    name = next(n for n in sys.modules if n.endswith("nodes.comfy.schedule"))
    return sys.modules[name].schedule_of(model)
