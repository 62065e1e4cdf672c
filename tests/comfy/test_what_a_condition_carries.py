"""Each key of a conditioning and of a LATENT, in one forward of ours: as core's own sampler has it, or refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy import carried_models as tiny
from vitrine_tests.comfy.conftest import COMFYUI

T = 600.0


def text(seed=0):
    return torch.randn(1, 7, tiny.CONTEXT, generator=torch.Generator().manual_seed(seed))


def noise(rows=2, channels=4, side=8):
    return torch.randn(rows, channels, side, side, generator=torch.Generator().manual_seed(9))


def ours(model, conditioning, x, t=T, regional=False):
    """x0 (B, C, h, w) of one forward, as every method of one forward makes it."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    denoiser = denoiser_of(model)
    cond = condition_of(model, conditioning, x, t, regional)
    signal, level = denoiser.schedule.scales(t)
    clean = torch.zeros_like(x)
    x_t = float(signal) * clean + float(level) * x
    return denoiser.predict(x_t, t, cond).x0


def cores(model, conditioning, x, t=T, mask=None, latent=None):
    """The same of core's sampler: one Euler step from the level of t to 0."""
    from comfy import samplers
    from comfy_extras.nodes_custom_sampler import Guider_Basic
    from vitrine.nodes.comfy.schedule import schedule_of

    sigma = float(schedule_of(model).sigma(t))
    guider = Guider_Basic(model)
    guider.set_conds(conditioning)
    empty = torch.zeros_like(x) if latent is None else latent
    sigmas = torch.tensor([sigma, 0.0])
    out = guider.sample(
        x, empty, samplers.sampler_object("euler"), sigmas, denoise_mask=mask, disable_pbar=True, seed=0
    )
    return model.model.process_latent_in(out)


@pytest.fixture(scope="module")
def made(comfy):
    with torch.inference_mode():
        return SimpleNamespace(sd=tiny.sd(), inpaint=tiny.sd(in_channels=9), unclip=tiny.unclip())


def lora(model):
    import comfy.hooks

    draw, sizes = torch.Generator().manual_seed(4), (64, 2)
    name = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"
    weights = {
        f"{name}.lora_up.weight": torch.randn(*sizes, generator=draw),
        f"{name}.lora_down.weight": torch.randn(*sizes[::-1], generator=draw),
    }
    return comfy.hooks.create_hook_lora(weights, 1.0, 0.0)


def pictures():
    embeds = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(3))
    return [{"clip_vision_output": SimpleNamespace(image_embeds=embeds), "strength": 1.0, "noise_augmentation": 0.2}]


CARRIED = {
    "plain": ("sd", lambda model: {}),
    "ControlNet": ("sd", lambda model: {"control": tiny.control(), "control_apply_to_uncond": True}),
    "ControlNet, at half strength": ("sd", lambda model: {"control": tiny.control(strength=0.5)}),
    "ControlNet, over": ("sd", lambda model: {"control": tiny.control(timestep_percent_range=(0.9, 1.0))}),
    "two ControlNets": ("sd", lambda model: {"control": chained()}),
    "gligen": ("sd", lambda model: {"gligen": tiny.gligen(model.model.diffusion_model)}),
    "hooks": ("sd", lambda model: {"hooks": lora(model)}),
    "strength": ("sd", lambda model: {"strength": 0.3}),
    "the whole run": ("sd", lambda model: {"start_percent": 0.0, "end_percent": 1.0}),
    "a timestep range": ("sd", lambda model: {"start_percent": 0.2, "end_percent": 1.0}),
    "prompts with timestep ranges, one after the other": ("sd", lambda model: [
        [text(), {"start_percent": 0.5, "end_percent": 1.0}], [text(1), {"start_percent": 0.0, "end_percent": 0.5}],
    ]),
    "a schedule of prompts": ("sd", lambda model: [
        [text(), {"clip_start_percent": 0.3, "clip_end_percent": 1.0, "start_percent": 0.6}],
        [text(1), {"clip_start_percent": 0.0, "clip_end_percent": 1.0, "end_percent": 0.6}],
    ]),
    "inpainting, plain": ("inpaint", lambda model: {}),
    "inpainting": ("inpaint", lambda model: {
        "concat_latent_image": noise(1) * 2, "concat_mask": (noise(1, 1, 64) > 0).float(),
    }),
    "unclip, plain": ("unclip", lambda model: {}),
    "unclip": ("unclip", lambda model: {"unclip_conditioning": pictures()}),
}  # fmt: skip
WITHOUT_EFFECT = {
    "plain",
    "ControlNet, over",
    "strength",
    "the whole run",
    "a timestep range",
    "inpainting, plain",
    "unclip, plain",
}


def chained():
    second = tiny.control(strength=0.7)
    second.set_previous_controlnet(tiny.control())
    return second


@pytest.mark.parametrize("key", CARRIED)
def test_a_key_acts_as_it_does_in_cores_sampler(made, key):
    name, settings = CARRIED[key]
    model, x = getattr(made, name), noise()
    with torch.inference_mode():
        told, plain = settings(model), [[text(), {}]]
        told = [[text(), told]] if isinstance(told, dict) else told
        before = {k: v.clone() for k, v in model.model.state_dict().items()}
        found, expected = ours(model, told, x), cores(model, told, x)
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
        assert torch.allclose(found, ours(model, plain, x), atol=1e-5) == (key in WITHOUT_EFFECT)
        assert torch.equal(ours(model, told, x), found)  # nothing of the first is left
        assert all(torch.equal(v, before[k]) for k, v in model.model.state_dict().items())


def test_reference_pictures(comfy):
    model, clip, _ = flow(comfy)
    with torch.inference_mode():
        ((words, settings),) = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))
        x = noise(2, 16, 16)
        references = [noise(1, 16, 16), noise(1, 16, 8)]
        told = [[words, settings | {"reference_latents": references}]]
        found = ours(model, told, x)
        assert torch.allclose(found, cores(model, told, x), atol=1e-3)
        assert not torch.allclose(found, ours(model, [[words, settings]], x), atol=1e-2)


def flow(comfy):
    return comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")


REFUSED = {
    "a timestep range that is over or to come": lambda c: [[c[0][0], {"start_percent": 0.6, "end_percent": 1.0}]],
    "several hints": lambda c: [[c[0][0], {"control": hints()}]],
}


def left(value=1.0):
    """MASK of the left half, of a picture of any size."""
    mask = torch.zeros(1, 8, 8)
    mask[:, :, :4] = value
    return mask


def placed(one, other):
    return lambda model: [[text(), one], [text(1), other]]


REGIONAL = {
    "masks": placed({"mask": left(), "mask_strength": 0.7}, {"mask": 1 - left(), "mask_strength": 1.0}),
    "masks as areas": placed(
        {"mask": left(), "set_area_to_bounds": True}, {"mask": 1 - left(), "set_area_to_bounds": True, "strength": 0.5}
    ),
    "areas": placed({"area": (8, 6, 0, 0), "strength": 1.0}, {"area": (8, 4, 0, 4), "strength": 0.6}),
    "areas in per cent": lambda model: [
        [text(), {"area": ("percentage", 1.0, 0.5, 0.0, 0.0)}],
        [text(1), {"strength": 0.4, "control": tiny.control()}],
    ],
    "a default prompt": placed({"mask": left()}, {"default": True}),
    "combined": lambda model: [[text(), {"strength": 0.3}], [text(1), {"hooks": lora(model)}]],
}
"""Prompts for parts of a picture: understood where predictions alone are wanted, refused where activations are."""


@pytest.mark.parametrize("key", REGIONAL)
def test_prompts_for_parts_of_a_picture(made, key):
    model, x = made.sd, noise()
    with torch.inference_mode():
        told = REGIONAL[key](model)
        found, expected = ours(model, told, x, regional=True), cores(model, told, x)
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
        assert not torch.allclose(found, ours(model, [[text(), {}]], x), atol=1e-3)
        with pytest.raises(VitrineError, match="one prompt for the whole picture"):
            ours(model, told, x)


def test_a_part_without_a_prompt_is_refused(made):
    """Core predicts zeros there."""
    with pytest.raises(VitrineError, match="50% of the picture"), torch.inference_mode():
        ours(made.sd, [[text(), {"mask": left()}]], noise(), regional=True)


def test_one_step_of_prompts_for_parts(comfy):
    """Of a flow too, whose velocity is left over from core's combination."""
    model, clip, _ = flow(comfy)
    with torch.inference_mode():
        one, other = (clip.encode_from_tokens_scheduled(clip.tokenize(words))[0] for words in ("a face", "a bald head"))
        mask = torch.zeros(1, 16, 16)
        mask[:, :, :8] = 1
        told = [[one[0], one[1] | {"mask": mask}], [other[0], other[1] | {"mask": 1 - mask}]]
        x = noise(2, 16, 16)
        expected = cores(model, told, x)
        assert torch.allclose(ours(model, told, x, regional=True), expected, atol=1e-3)
        assert not torch.allclose(ours(model, [list(one)], x), expected, atol=1e-2)


def hints():
    control = tiny.control()
    return control.set_cond_hint(torch.rand(2, 3, 64, 64), strength=1.0)


@pytest.mark.parametrize("key", REFUSED)
def test_what_one_forward_cannot_honour_is_refused(made, key):
    with pytest.raises(VitrineError, match=r"conditioning|ControlNet"), torch.inference_mode():
        ours(made.sd, REFUSED[key]([[text(), {}]]), noise())


def test_a_key_of_another_pack_goes_along(made):
    """Core ignores it; a wrapper of its pack on the MODEL reads it in our forward as in a run."""
    import comfy.patcher_extension
    from vitrine.nodes.comfy.carried import foreign_keys, with_foreign

    def scaled(executor, model, conds, x, timestep, options):
        factors = [part.get("my_pack_scale", 1.0) for cond in conds if cond for part in cond]
        return [out * factors[0] for out in executor(model, conds, x, timestep, options)]

    told, plain = [[text(), {"my_pack_scale": 2.0, "my_pack_none": None}]], [[text(), {}]]
    wrapped = made.sd.clone()
    wrapped.add_wrapper(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, scaled)
    with torch.inference_mode():
        x = noise()
        assert torch.equal(ours(made.sd, told, x), ours(made.sd, plain, x))
        expected = cores(wrapped, told, x)
        assert not torch.allclose(expected, cores(wrapped, plain, x), atol=1e-2)
        assert torch.allclose(ours(wrapped, told, x), expected, atol=1e-3)
    assert foreign_keys(told) == "not read by ComfyUI: my_pack_scale" and foreign_keys(plain) == ""
    assert with_foreign("a report", told, told) == "a report\nnot read by ComfyUI: my_pack_scale"
    assert with_foreign("a report", plain, None) == "a report"


def test_every_report_about_a_prompt_says_what_is_not_read(comfy):
    """Of NEMO and of W2W too: each node with a text output and a CONDITIONING calls one of the two functions."""
    import inspect
    import sys

    lacking = []
    for node_id, node in comfy.nodes.NODE_CLASS_MAPPINGS.items():
        schema = node.define_schema() if node_id.startswith("Vitrine") else None
        kinds = [] if schema is None else [i.get_io_type() for i in schema.inputs if not getattr(i, "optional", False)]
        if "CONDITIONING" in kinds and "STRING" in [o.get_io_type() for o in schema.outputs]:
            source = inspect.getsource(sys.modules[node.__module__])
            if "with_foreign(" not in source and "foreign_keys(" not in source:
                lacking.append(node_id)
    assert lacking == ["VitrineFindCorrespondence"]  # a list of points; the log says it: test_every_computing_node.py


def test_part_of_a_run_and_rows_at_several_levels(made):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    with torch.inference_mode():
        told = [[text(), {"control": tiny.control(timestep_percent_range=(0.0, 0.5))}]]
        cond = condition_of(made.sd, told, noise())
        with pytest.raises(VitrineError, match="ControlNet"):
            denoiser_of(made.sd).predict(noise(), torch.tensor([10.0, 900.0]), cond)


def test_gradients_pass_a_control_net(made):
    """Of the text, as an attack needs them: the ControlNet reads it too."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import allow_gradients, denoiser_of, differentiable

    with torch.inference_mode():
        cond = condition_of(made.sd, [[text(), {"control": tiny.control()}]], noise())
        denoiser = denoiser_of(made.sd)
    with torch.inference_mode(False), torch.enable_grad(), differentiable():
        allow_gradients(made.sd)
        cond = cond.to("cpu", copy=True)
        words = cond.text.clone().requires_grad_()
        out = denoiser.predict(noise(), T, type(cond)(words, None, cond.extra, cond.fixed)).x0
        (gradient,) = torch.autograd.grad(out.square().sum(), words)
    assert bool(torch.isfinite(gradient).all()) and float(gradient.abs().max()) > 0


def test_control_values_act_in_one_forward(comfy):
    """A control checkpoint's values, too: they used to act in a sampler only."""
    from vitrine.engine.control import SizeCondition
    from vitrine.nodes.comfy.conditioning import with_sizes

    model, clip, _ = comfy.call("VitrineLoadPortraitsTransformer", weight="power-cosine")
    told = comfy.call("VitrineLoadControl", model=model, file="portraits power-cosine")[0]
    with torch.inference_mode():
        plain = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))
        sized = with_sizes(plain, SizeCondition((24, 32), (6, 3), (64, 64), True), (64, 64))
        x = noise(2, 4, 16)
        found = ours(told, sized, x, 100.0)
        assert torch.allclose(found, cores(told, sized, x, 100.0), atol=1e-3)
        assert not torch.allclose(found, ours(told, plain, x, 100.0), atol=1e-3)


def test_every_key_that_core_reads_is_known(comfy):
    from vitrine.nodes.comfy.carried import READ_BY_MODELS

    source = (COMFYUI / "comfy" / "model_base.py").read_text()
    read = set(re.findall(r"kwargs(?:\.get\(|\.pop\(|\[)['\"](\w+)['\"]", source))
    of_the_call = {"noise", "device", "latent_image", "denoise_mask", "area"}
    assert read - of_the_call <= READ_BY_MODELS


ONE_STEP = {
    "student": "(the model is the student)",
    "preset": "manual",
    "timestep": 999.0,
    "noise": "unit",
    "seed": 5,
}


@pytest.fixture(scope="module")
def portraits(comfy):
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    with torch.inference_mode():
        return model, clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))


def test_a_picture_of_a_batch_is_the_batchs(comfy, portraits):
    model, positive = portraits
    told = {"model": model, "positive": positive, **ONE_STEP}
    batch = comfy.call("VitrineEMDOneStepGenerator", latent={"samples": torch.zeros(4, 4, 16, 16)}, **told)
    four = {"samples": torch.zeros(4, 4, 16, 16)}
    (third,) = comfy.nodes.NODE_CLASS_MAPPINGS["LatentFromBatch"]().frombatch(four, 2, 1)
    alone = comfy.call("VitrineEMDOneStepGenerator", latent=third, **told)
    assert not torch.allclose(batch[0]["samples"][0], batch[0]["samples"][2], atol=1e-1)
    assert torch.allclose(alone[0]["samples"], batch[0]["samples"][2:3], atol=1e-3)
    assert alone[0]["batch_index"] == [2]


@pytest.mark.parametrize(
    "more",
    [
        {"noise_mask": torch.ones(1, 1, 16, 16)},
        {"type": "audio"},
        {"samples": torch.zeros(1, 4, 3, 16, 16)},
    ],
    ids=["noise mask", "audio", "video"],
)
def test_a_latent_that_is_not_understood_is_refused(comfy, portraits, more):
    model, positive = portraits
    latent = {"samples": torch.zeros(1, 4, 16, 16)} | more
    with pytest.raises(VitrineError, match="latent"):
        comfy.call("VitrineEMDOneStepGenerator", model=model, positive=positive, latent=latent, **ONE_STEP)
    score = {"method": "one step", "seeds": 2, "timestep_index": 4, "negative": positive}
    with pytest.raises(VitrineError, match="latent"):
        comfy.call("VitrineNEMODetect", model=model, positive=positive, latent=latent, **score)


def test_sizes_follow_the_rows(made):
    """One conditioning for rows that are stacked anew: a method's own order of rows."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    with torch.inference_mode():
        cond = condition_of(made.unclip, [[text(), {"unclip_conditioning": pictures()}]], noise(1))
        one = denoiser_of(made.unclip).predict(noise(1), T, cond).x0
        rows = cond.take(torch.zeros(3, dtype=torch.long))
        several = denoiser_of(made.unclip).predict(noise(1).repeat(3, 1, 1, 1), T, rows).x0
        assert torch.allclose(several, one.expand(3, -1, -1, -1), atol=1e-5)


def test_several_noise_levels_have_no_one_prompt(made):
    """Without a timestep, as where rows are at several levels, a range is refused and not ignored."""
    from vitrine.nodes.comfy.conditioning import condition_of

    told = [[text(), {"start_percent": 0.2, "end_percent": 1.0}]]
    with pytest.raises(VitrineError, match="several noise levels"):
        condition_of(made.sd, told, noise())


def test_a_node_takes_the_prompt_of_its_timestep(comfy, portraits):
    """Tap, one-step sampler and detection with two prompts, one after the other."""
    model, first = portraits
    second = [[first[0][0].flip(1), dict(first[0][1])]]
    told = [
        [first[0][0], first[0][1] | {"start_percent": 0.0, "end_percent": 0.4}],
        [second[0][0], second[0][1] | {"start_percent": 0.4, "end_percent": 1.0}],
    ]
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    step = {"model": model, "latent": latent, **ONE_STEP}
    found = comfy.call("VitrineEMDOneStepGenerator", positive=told, **step)[0]["samples"]
    assert torch.equal(found, comfy.call("VitrineEMDOneStepGenerator", positive=first, **step)[0]["samples"])
    late = step | {"timestep": 99.0}
    found = comfy.call("VitrineEMDOneStepGenerator", positive=told, **late)[0]["samples"]
    assert torch.equal(found, comfy.call("VitrineEMDOneStepGenerator", positive=second, **late)[0]["samples"])
    score = {"model": model, "latent": latent, "method": "one step", "seeds": 2, "timestep_index": 4}
    score["negative"] = first
    found = comfy.call("VitrineNEMODetect", positive=told, **score)[1]
    assert found == comfy.call("VitrineNEMODetect", positive=first, **score)[1]


def test_a_job_knows_what_its_prompt_carries(comfy):
    """It resumed an inversion of another ControlNet's picture, or stopped at an input that it could not read."""
    from vitrine.engine.jobs.digests import digest
    from vitrine.engine.network.condition import Condition
    from vitrine.nodes.comfy.carried import CARRIED, Carried

    def of(**settings):
        return digest(Condition(torch.zeros(1, 2, 3), fixed={CARRIED: Carried(settings)}))

    first = tiny.control()
    other_picture, other_network = tiny.control(), tiny.control()
    other_picture.cond_hint_original = other_picture.cond_hint_original + 0.1
    tiny.filled(other_network.control_model, 6)
    others = [other_picture, other_network, tiny.control(strength=0.5), tiny.control(timestep_percent_range=(0.0, 0.5))]
    assert of(control=first) == of(control=tiny.control())
    assert len({of(control=control) for control in (first, *others)}) == 5
    assert of(control=first, hooks=object()) != of(control=first, hooks=object()), "nobody knows: begun anew"
