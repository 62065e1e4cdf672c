"""W2WPipeline on the portraits model: one model a picture, exports, edits that begin late (checks 11, 12)."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import EditConfig, InvertConfig, SampleConfig, WeightSpace, materialise, write_lora

pytestmark = pytest.mark.rounding
PROMPT = "a smiling face with cap left navy shirt on blue"
HOW = {"num_inference_steps": 6, "guidance_scale": 2.0, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe():
    made = W2WPipeline.from_pipe(load_portraits().pipeline())
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def space():
    return WeightSpace.load(PEOPLE_SPACE)


def draw(pipe, **how):
    return pipe(PROMPT, **HOW | how).images


def test_without_a_model_it_is_stable_diffusion(pipe):
    plain = super(W2WPipeline, pipe).__call__(PROMPT, generator=[torch.Generator().manual_seed(3)], **HOW).images
    assert torch.equal(draw(pipe, seeds=[3]), plain)


def test_rows_have_their_own_models(pipe, space, no_hooks_left):
    people = pipe.sample_models(space, [0, 1, 2])
    together = draw(pipe, space=space, model=people, seeds=[5, 6, 7])
    for i in range(3):
        alone = draw(pipe, space=space, model=people[i], seeds=[5 + i])
        assert (together[i] - alone[0]).abs().max() < 1e-4
    assert (together[0] - draw(pipe, seeds=[5])[0]).abs().max() > 0.1
    no_hooks_left(pipe.unet)


def test_delayed_edits(pipe, space):
    person, edits = pipe.sample_models(space, [4]), {"beard": 3.0, "glasses": 2.0}
    edited = pipe.edit_model(space, person, edits)
    how = {"space": space, "seeds": [1]}
    never = draw(pipe, model=person, edits=edits, edit_config=EditConfig(start_timestep=-1), **how)
    always = draw(pipe, model=person, edits=edits, edit_config=EditConfig(start_timestep=1000), **how)
    late = draw(pipe, model=person, edits=edits, edit_config=EditConfig(start_timestep=500), **how)
    assert torch.equal(never, draw(pipe, model=person, **how))
    assert torch.equal(always, draw(pipe, model=edited, **how))
    assert (late - never).abs().max() > 1e-3 and (late - always).abs().max() > 1e-3


def test_an_exported_lora_draws_the_same_picture(pipe, space, tmp_path):
    person = pipe.sample_models(space, [8], SampleConfig(components=space.dimension))
    wanted = draw(pipe, space=space, model=person, seeds=[2])
    for dialect in ("kohya", "diffusers"):
        path = write_lora(tmp_path / f"{dialect}.safetensors", materialise(space, person), dialect)
        pipe.load_lora_weights(str(path), adapter_name=dialect)
        found = super(W2WPipeline, pipe).__call__(PROMPT, generator=[torch.Generator().manual_seed(2)], **HOW).images
        pipe.unload_lora_weights()
        assert (found - wanted).abs().max() < 1e-4


def test_invert_image(pipe, space):
    seen, before = [], [p.requires_grad for p in pipe.unet.parameters()]
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model, found = pipe.invert_image(
        space,
        image,
        PROMPT,
        InvertConfig(steps=3, batch=2, check_every=1),
        mask=torch.ones(2, 64, 64),
        progress=lambda step, total, preview=None: seen.append(step),
    )
    assert seen == [1, 2, 3] and len(model) == 2 and len(found.losses) == 3
    assert [p.requires_grad for p in pipe.unet.parameters()] == before


def test_every_door_draws_the_same_people(pipe, space):
    """New Person (W2W)'s default; tests/comfy/w2w holds the node to it."""
    drawn = pipe.sample_models(space, [0, 3])
    joined = pipe.sample_models(space, [0, 3], SampleConfig(attributes="joined"))
    assert torch.equal(drawn.coefficients, joined.coefficients)
    assert drawn.history[0]["sample"]["seeds"] == [0, 3] and drawn.history[0]["sample"]["inherit"] == 0


def test_refusals(pipe, space):
    person = pipe.sample_models(space, [0])
    with pytest.raises(VitrineError, match="space"):
        pipe(PROMPT, space=space.first(7), model=person)
    with pytest.raises(VitrineError, match="models"):
        pipe(PROMPT, space=space, model=pipe.sample_models(space, [0, 1]), seeds=[1, 2, 3])
    with pytest.raises(VitrineError, match="beard"):
        pipe(PROMPT, space=space, model=person, edits={"bread": 1.0})
    with pytest.raises(VitrineError, match="a model of space"):
        materialise(space.first(7), person)
    with pytest.raises(VitrineError, match="2 models"):
        materialise(space, pipe.sample_models(space, [0, 1]))
