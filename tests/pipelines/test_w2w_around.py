"""W2W around SDXL and every transformer's own pipeline: each picture's model is on its network while it is drawn."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler, DiTPipeline, StableDiffusionImg2ImgPipeline
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import family_of
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.pipelines.adapter import encoded
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    EditConfig,
    InvertConfig,
    Manifest,
    WeightSpace,
    initial_lora,
    invert,
    load_space,
    materialise,
)
from vitrine.engine.w2w.train.batched_lora import target_layers
from vitrine_tests import models
from vitrine_tests.lanes import SLOW, nightly_but
from vitrine_tests.pipelines.encoded import READING, SOURCES, backbone, drawn, source
from vitrine_tests.pipelines.test_family_taps import by_hand


def space_on(net, targets=("to_q", "to_v"), strength=0.5):
    """A space of three components over the LoRAs of a network, with one label."""
    manifest = Manifest.of(initial_lora(net, targets, rank=1, alpha=1.0))
    g = torch.Generator().manual_seed(2)
    rows, _ = torch.linalg.qr(torch.randn(manifest.size, 3, generator=g))
    scale = torch.full((manifest.size,), strength * manifest.size**0.5)
    mean, known = torch.randn(manifest.size, generator=g) * strength, torch.randn(8, 3, generator=g)
    return WeightSpace(
        manifest, mean, scale, rows.T.contiguous(), torch.ones(3), known, 8, directions={"beard": torch.eye(3)[0]}
    )


def with_weights(net, lora):
    """The network with a LoRA in its weights, by hand."""
    changed = copy.deepcopy(net)
    with torch.no_grad():
        for path, layer in lora.items():
            changed.get_submodule(path).weight += layer.delta()
    return changed


@pytest.fixture(scope="module", params=nightly_but(SOURCES, [name for name in SOURCES if name not in SLOW]))
def case(request):
    stock, told = source(request.param)
    return stock, told, space_on(backbone(stock))


def close(a, b, limit=1e-5):
    return float((a - b).abs().max()) <= limit * max(1.0, float(b.abs().max()))


def test_a_model_draws_as_its_lora_in_the_weights(case):
    stock, told, space = case
    pipe, plain = W2WPipeline.from_pipe(stock), drawn(stock, told)
    assert isinstance(pipe, W2WPipeline) and isinstance(pipe, type(stock)) and torch.equal(drawn(pipe, told), plain)
    person = pipe.sample_models(space, [4])
    worn = drawn(pipe, told, space=space, model=person)
    name = "unet" if getattr(stock, "unet", None) is not None else "transformer"
    old = getattr(stock, name)
    try:
        setattr(stock, name, with_weights(old, materialise(space, person.coefficients[0])))
        expected = drawn(stock, told)
    finally:
        setattr(stock, name, old)
    assert close(worn, expected, 1e-4), "Chroma rounds 57 blocks otherwise, by the instruction set"
    assert float((worn - plain).abs().max()) > 10 * float((worn - expected).abs().max())
    assert torch.equal(drawn(stock, told), plain), "nothing stays"


@pytest.mark.nightly
def test_pictures_have_their_own_models(case, no_hooks_left):
    stock, told, space = case
    pipe = W2WPipeline.from_pipe(stock)
    people = pipe.sample_models(space, [0, 1])
    both = drawn(pipe, told, space=space, model=people, seeds=[5, 6])
    for i in range(2):
        alone = drawn(pipe, told, space=space, model=people[i], seeds=[5 + i])
        assert close(both[i], alone[0], 3e-5), "the batch is rounded otherwise, in 57 blocks of Chroma"
    assert not close(both[0], both[1], 1e-4)
    same = drawn(pipe, told, space=space, model=people[0], seeds=[5, 6])
    assert close(same[0], both[0]) and not close(same[1], both[1], 1e-4)
    no_hooks_left(backbone(stock))


@pytest.mark.nightly
def test_edits_begin_where_the_scheduler_stands(case):
    stock, told, space = case
    pipe = W2WPipeline.from_pipe(stock)
    person, how = pipe.sample_models(space, [4]), {"space": space}
    edited, edits = pipe.edit_model(space, person, {"beard": 3.0}), {"beard": 3.0}
    drawn(stock, told)  # sets the timesteps
    first, second = stock.scheduler.timesteps.tolist()[:2]
    never, late, always = (
        drawn(pipe, told, model=person, edits=edits, edit_config=EditConfig(start_timestep=start), **how)
        for start in (-1, (first + second) / 2, 1000)
    )
    assert torch.equal(never, drawn(pipe, told, model=person, **how))
    assert torch.equal(always, drawn(pipe, told, model=edited, **how))
    assert not close(late, never, 1e-4) and not close(late, always, 1e-4)


@pytest.mark.parametrize("name", nightly_but(READING, [name for name in READING if name not in SLOW]))
def test_a_picture_becomes_the_engines_model(name):
    stock, told = source(name)
    pipe, space = W2WPipeline.from_pipe(stock), space_on(backbone(stock))
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    config = InvertConfig(steps=3, check_every=1, components=2)
    model, _ = pipe.invert_image(space, image, told["prompt"], config)
    with torch.no_grad():
        size = (64, 64)
        if name == "sdxl":
            cond = encoded(stock, [told["prompt"]], size)
        else:
            cond = family_of(stock.transformer).condition(stock, [told["prompt"]], *size)
    expected = invert(Denoiser.from_diffusers(stock), space, by_hand(stock, image), cond, config)
    assert torch.equal(model.coefficients, expected.coefficients) and float(expected.coefficients.abs().max()) > 0


def test_layers_that_see_all_pictures_in_one_row_take_one_model():
    stock, told = source("z_image")
    (path,) = [p for p in target_layers(stock.transformer, ("2-1",)) if "embedder" in p]
    space, pipe = space_on(stock.transformer, (path,)), W2WPipeline.from_pipe(stock)
    people = pipe.sample_models(space, [0, 1])
    assert drawn(pipe, told, space=space, model=people[0], seeds=[5, 6]).shape[0] == 2
    with pytest.raises(VitrineError, match="the tokens of all pictures in one row"):
        drawn(pipe, told, space=space, model=people, seeds=[5, 6])


def test_refusals():
    stock, told = source("flux")
    pipe, space = W2WPipeline.from_pipe(stock), space_on(stock.transformer)
    with pytest.raises(VitrineError, match="eta"):
        drawn(pipe, told, eta=1.0)
    with pytest.raises(VitrineError, match="joint_attention_kwargs"):
        person = pipe.sample_models(space, [0])
        drawn(pipe, told, space=space, model=person, joint_attention_kwargs={"scale": 0.5})
    other = space_on(source("z_image")[0].transformer)
    with pytest.raises(VitrineError, match="LoRA layers"):
        drawn(pipe, told, space=other, model=pipe.sample_models(other, [0]))
    unknown = DiTPipeline(models.dit(), models.vae(), DDIMScheduler())
    with pytest.raises(VitrineError, match="given DiTTransformer2DModel"):
        W2WPipeline.from_pipe(unknown)


def test_image_to_image_draws_each_picture_with_its_model():
    source = StableDiffusionImg2ImgPipeline(**load_portraits().pipeline().components)
    source.set_progress_bar_config(disable=True)
    pipe, space = W2WPipeline.from_pipe(source), load_space(PEOPLE_SPACE)
    assert isinstance(pipe, W2WPipeline) and isinstance(pipe, StableDiffusionImg2ImgPipeline)
    pictures = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def drawn(seeds):
        how = {"image": pictures[seeds], "strength": 1.0, "num_inference_steps": 2, "output_type": "latent"}
        people = pipe.sample_models(space, seeds=seeds)
        return pipe("a smiling face", space=space, model=people, seeds=seeds, **how).images

    both = drawn([0, 1])
    assert (both[0] - both[1]).abs().max() > 0.1
    for i in (0, 1):
        torch.testing.assert_close(both[i : i + 1], drawn([i]), atol=1e-4, rtol=1e-4)


def test_a_network_whose_layers_are_cast_is_refused_before_the_first_step():
    """It ended in torch's words: Float was expected, Half was found."""
    stock, _ = source("sdxl")
    pipe = W2WPipeline.from_pipe(stock)
    space = space_on(stock.unet)
    stock.unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with pytest.raises(VitrineError, match="layerwise casting; accepted: .* compute in"):
        pipe.invert_image(space, torch.rand(1, 3, 64, 64), "a cat", InvertConfig(steps=2, check_every=1000))
