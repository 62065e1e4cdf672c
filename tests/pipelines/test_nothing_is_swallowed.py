"""An argument that changes nothing is refused; one that is taken has its effect."""

import pytest
import torch
from vitrine.engine.control import GammaConfig, GuidanceConfig, SizeCondition
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import EMDOneStepPipeline, NEMOPipeline, ResolutionTransferPipeline, W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import EditConfig, load_space, materialise
from vitrine_tests.machine.calls import around
from vitrine_tests.machine.stock import stock

PROMPT = "sks person"
FAST = {"num_inference_steps": 2, "output_type": "latent"}


@pytest.fixture(scope="module")
def w2w():
    pipe = W2WPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def space():
    return load_space(PEOPLE_SPACE)


def test_half_of_what_a_w2w_call_needs_is_refused(w2w, space):
    person = w2w.sample_models(space, [0])
    for alone in ({"model": person}, {"space": space}, {"edits": {"beard": 1.0}}, {"edit_config": EditConfig()}):
        with pytest.raises(VitrineError, match="space and model together"):
            w2w(PROMPT, **alone, **FAST)
    with pytest.raises(VitrineError, match="space and model together"):
        w2w(PROMPT, space=space, edits={"beard": 1.0}, **FAST)


def test_each_prompt_keeps_its_model_when_it_has_several_pictures(w2w, space):
    """Rows had models 0, 1, 0, 1 where pictures are of prompts 0, 0, 1, 1."""
    people, seeds = w2w.sample_models(space, [0, 1]), [5, 6, 7, 8]
    prompts = [PROMPT, f"{PROMPT} on pink"]
    together = w2w(prompts, space=space, model=people, seeds=seeds, num_images_per_prompt=2, **FAST).images
    rows = [(prompts[i // 2], people[i // 2], seeds[i]) for i in range(4)]
    alone = [w2w(p, space=space, model=m, seeds=[seed], **FAST).images for p, m, seed in rows]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)
    assert not torch.allclose(together[0], together[2], atol=1e-2)


@pytest.fixture(scope="module")
def pixart():
    from vitrine.engine.pipelines import ControlConditionedPipeline

    return around(ControlConditionedPipeline, stock("pixart-1024"))


SIZED = {"gamma": GammaConfig(), "size_condition": SizeCondition((64, 64)), **FAST, "height": 64, "width": 64}


def test_pixart_takes_generators_and_guidance(pixart):
    def run(**more):
        return pixart("a cat", **SIZED, **more).images

    seeded = run(seeds=[3])
    assert torch.equal(run(generator=torch.Generator().manual_seed(3)), seeded)
    assert torch.equal(run(generator=[torch.Generator().manual_seed(3)]), seeded)
    assert torch.equal(run(seeds=[3], guidance=GuidanceConfig(scale=2.0)), run(seeds=[3], guidance_scale=2.0))
    assert not torch.equal(run(seeds=[3], guidance_scale=2.0), seeded)


def test_and_refuses_what_it_cannot_honour(pixart):
    for more in ({"cross_attention_kwargs": {}}, {"use_resolution_binning": True}, {"clean_caption": False}):
        with pytest.raises(VitrineError, match="arguments: given"):
            pixart("a cat", **SIZED, **more)
    noise = seeded_noise([1], (4, 8, 8))
    for more in ({"seeds": [1], "latents": noise}, {"seeds": [1], "generator": torch.Generator()}):
        with pytest.raises(VitrineError, match="one of them"):
            pixart("a cat", **SIZED, **more)
    with pytest.raises(VitrineError, match="guidance, guidance_scale"):
        pixart("a cat", **SIZED, guidance=GuidanceConfig(), guidance_scale=2.0)


WRONG = {
    "space": lambda w2w, pixart, space, value: w2w.sample_models(value, [0]),
    "spaces of a call": lambda w2w, pixart, space, value: w2w(PROMPT, space=value, model=value, **FAST),
    "model": lambda w2w, pixart, space, value: w2w.edit_model(space, value, {}),
    "strengths": lambda w2w, pixart, space, value: w2w.edit_model(space, w2w.sample_models(space, 0), value),
    "picture's space": lambda w2w, pixart, space, value: w2w.invert_image(value, torch.zeros(1, 3, 64, 64), PROMPT),
    "LoRA": lambda w2w, pixart, space, value: materialise(space, value),
    "neurons": lambda w2w, pixart, space, value: NEMOPipeline.from_pipe(w2w)(PROMPT, neurons=value, **FAST),
    "calibration": lambda w2w, pixart, space, value: NEMOPipeline.from_pipe(w2w).detect([PROMPT], value),
    "search": lambda w2w, pixart, space, value: NEMOPipeline.from_pipe(w2w).find([PROMPT], value),
    "result": lambda w2w, pixart, space, value: NEMOPipeline.from_pipe(w2w).neurons(value),
    "preset": lambda w2w, pixart, space, value: EMDOneStepPipeline.from_pipe(w2w)(PROMPT, preset=value),
    "config": lambda w2w, pixart, space, value: ResolutionTransferPipeline.from_pipe(w2w, value),
    "guidance": lambda w2w, pixart, space, value: pixart("a cat", guidance=value, **FAST),
    "checkpoint": lambda w2w, pixart, space, value: pixart("a cat", checkpoint=value, **FAST),
}


@pytest.mark.parametrize("value", ["people.w2w.safetensors", 3, object()], ids=["a path", "a number", "an object"])
@pytest.mark.parametrize("name", WRONG)
def test_an_object_of_another_class_is_refused_by_name(w2w, pixart, space, name, value):
    """Such as the path of a file in place of what it contains: it was an AttributeError of something inside."""
    with pytest.raises(VitrineError, match=r"accepted: a [A-Z]\w+"):
        WRONG[name](w2w, pixart, space, value)


def test_one_seed_is_a_list_of_one(w2w, space):
    single, listed = w2w.sample_models(space, 3), w2w.sample_models(space, [3])
    assert torch.equal(single.coefficients, listed.coefficients) and single.history == listed.history
    for seeds in ("3", [0.5], None):
        with pytest.raises(VitrineError, match="whole numbers"):
            w2w.sample_models(space, seeds)
