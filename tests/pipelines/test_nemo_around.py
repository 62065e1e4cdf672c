"""NEMO around SDXL and transformers: their pipelines go on sampling, with neurons blocked meanwhile."""

import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    BlockConfig,
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    block,
    find_neurons,
    fingerprint_of,
    make_probe,
    score_prompts,
    value_activations,
    value_sites,
)
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.pipelines.nemo_prompts import conditions, latent_shape
from vitrine.engine.tracing.fingerprint import width_of
from vitrine_tests.lanes import SLOW, nightly_but
from vitrine_tests.machine import stock
from vitrine_tests.pipelines.test_family_taps import MAKERS

STEPS = {"num_inference_steps": 2, "output_type": "latent"}
SIDES = {"Flux2KleinPipeline": 256, "PixArtAlphaPipeline": 128}
"""In pixels, so that latents have the 11 positions and more that the score compares."""
PROBE = ProbeConfig(seeds=2, timestep_index=1)
STILL = [name for name in MAKERS if name != "wan"]


@pytest.fixture(scope="module", params=nightly_but([*STILL, "sdxl"], [n for n in STILL if n not in SLOW]))
def source(request):
    pipe = stock.sdxl() if request.param == "sdxl" else MAKERS[request.param]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def network(source):
    return getattr(source, "unet", None) or source.transformer


def some_neurons(source, count=3):
    net = network(source)
    chosen = {s.address: tuple(range(min(count, width_of(net, s)))) for s in value_sites(net, "all")}
    return NeuronSet(chosen, fingerprint_of(net))


def side(pipe):
    return SIDES.get(type(pipe).__name__, 128)


def sampled(pipe, **more):
    g = torch.Generator().manual_seed(3)
    settings = STEPS | {"height": side(pipe), "width": side(pipe), "generator": g} | more
    if "PixArt" in type(pipe).__name__:
        settings["use_resolution_binning"] = False
    return pipe(prompt="a photo of a cat", **settings).images


def test_nothing_blocked_is_the_stock_pipeline_and_blocking_is_the_engines(source):
    pipe, neurons = NEMOPipeline.from_pipe(source), some_neurons(source)
    assert isinstance(pipe, NEMOPipeline) and isinstance(pipe, type(source))
    untouched = sampled(source)
    assert torch.equal(sampled(pipe), untouched) and torch.equal(sampled(pipe, neurons=NeuronSet({})), untouched)
    blocked = sampled(pipe, neurons=neurons)
    with block(network(source), neurons):
        expected = sampled(source)
    assert torch.equal(blocked, expected) and not torch.equal(blocked, untouched)
    assert torch.equal(sampled(source), untouched)  # nothing stays


def test_a_call_of_another_size_is_blocked_as_its_own_is(source):
    pipe, neurons, wide = NEMOPipeline.from_pipe(source), some_neurons(source), {"width": side(source) + 64}
    blocked = sampled(pipe, neurons=neurons, **wide)
    with block(network(source), neurons):
        expected = sampled(source, **wide)
    assert torch.equal(blocked, expected) and not torch.equal(blocked, sampled(source, **wide))


def test_parts_of_a_run_follow_the_scheduler(source):
    pipe, neurons = NEMOPipeline.from_pipe(source), some_neurons(source)
    early, late, whole = (
        sampled(pipe, neurons=neurons, block_config=BlockConfig(start_percent=start, end_percent=end))
        for start, end in ((0.0, 0.5), (0.5, 1.0), (0.0, 1.0))
    )
    assert torch.equal(whole, sampled(pipe, neurons=neurons))
    assert not torch.equal(early, late) and not torch.equal(early, whole) and not torch.equal(late, whole)
    assert not torch.equal(early, sampled(pipe))


def test_statistics_scores_and_searches_are_the_engines(source):
    pipe = NEMOPipeline.from_pipe(source, size=(side(source), side(source)))
    texts = ["a photo of a cat", "a horse", "a photo of"]
    denoiser, sites = Denoiser.from_diffusers(source), value_sites(network(source))
    conds, shape = conditions(pipe, texts), latent_shape(pipe)
    assert shape[1] == side(source) // pipe._adapter.factor and all(isinstance(c, Condition) for c in conds)
    calibration = pipe.calibrate(texts, ["statistics"])
    statistics = calibration.statistics
    blank = torch.randn(1, shape[0], 16, 16, generator=torch.Generator().manual_seed(1))
    each = torch.stack([value_activations(denoiser, c, sites, blank)[0] for c in conds])
    mean = statistics.means[sites[0].address]
    assert torch.allclose(mean, each.mean((0, 1)) if each.ndim == 3 else each.mean(0), rtol=1e-4, atol=1e-6)
    probe = make_probe(denoiser, config=PROBE)
    expected, _ = score_prompts(probe, conds, shape, 0.0)
    assert [s.value for s in pipe.detect(texts, None, "one step", PROBE)] == pytest.approx(
        [s.value for s in expected], abs=1e-5
    )
    config = SearchConfig(tau=1e-6, theta=0.5, theta_step=0.5, theta_min=0.1)
    (result,) = pipe.find(texts[:1], calibration, config, PROBE)
    (same,) = find_neurons(probe, texts[:1], conds[:1], statistics, shape, config)
    assert result.search is not None and result.search.neurons == same.search.neurons
    pipe.neurons(result).check(network(source), value_sites(network(source), "all"))


def test_rows_that_cannot_be_told_are_refused_before_sampling(source):
    pipe, neurons = NEMOPipeline.from_pipe(source), some_neurons(source)
    config = BlockConfig(branch="cond")
    if type(source).__name__ in ("StableDiffusion3Pipeline", "StableDiffusionXLPipeline"):
        negative = {"negative_prompt": "a horse"}  # SDXL's empty prompt is zeros, whose values nothing changes
        only = sampled(pipe, neurons=neurons, block_config=config, **negative)
        both, untouched = sampled(pipe, neurons=neurons, **negative), sampled(pipe, **negative)
        assert not torch.equal(only, both) and not torch.equal(only, untouched)
    else:
        with pytest.raises(VitrineError, match="branch"):
            sampled(pipe, neurons=neurons, block_config=config)
    with pytest.raises(VitrineError, match="arguments"):
        sampled(pipe, neurones=neurons)


PICTURE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def _with_pictures(kind):
    """A Stable Diffusion pipeline that takes pictures, on the portraits, and what it is called with."""
    parts = stock.sd().components
    if kind == "img2img":
        return StableDiffusionImg2ImgPipeline(**parts), {"image": PICTURE, "strength": 1.0}
    if kind == "inpaint":
        mask = torch.zeros(1, 1, 64, 64)
        mask[..., 32:] = 1
        return StableDiffusionInpaintPipeline(**parts), {"image": PICTURE, "mask_image": mask}
    net = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 16, 32))  # a factor of 4
    return StableDiffusionControlNetPipeline(**parts, controlnet=net), {"image": PICTURE}


@pytest.mark.parametrize("kind", ["img2img", "inpaint", "controlnet"])
def test_a_pipeline_that_takes_pictures_goes_on_taking_them(kind, no_hooks_left):
    source, pictures = _with_pictures(kind)
    source.set_progress_bar_config(disable=True)
    no_hooks_left(source.unet)
    pipe = NEMOPipeline.from_pipe(source)
    assert isinstance(pipe, NEMOPipeline) and isinstance(pipe, type(source))

    def drawn(pipe, **more):
        g = torch.Generator().manual_seed(3)
        return pipe("a smiling face", generator=g, height=64, width=64, **STEPS, **pictures, **more).images

    def img2img(pipe, **more):
        g = torch.Generator().manual_seed(3)
        return pipe("a smiling face", generator=g, **STEPS, **pictures, **more).images

    draw = img2img if kind == "img2img" else drawn
    plain, neurons = draw(source), some_neurons(source, 32)
    assert torch.equal(draw(pipe), plain)
    away = draw(pipe, neurons=neurons)
    assert torch.isfinite(away).all() and not torch.equal(away, plain)
    with block(source.unet, neurons, BlockConfig()):
        assert torch.equal(draw(source), away)
    assert torch.equal(draw(source), plain)
