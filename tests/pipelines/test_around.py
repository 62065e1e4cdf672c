"""A pipeline around another does all that the other does: nothing of a stock pipeline is missing or without effect."""

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionImg2ImgPipeline
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    ResolutionTransferPipeline,
    W2WPipeline,
)
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.machine.stock import modules, stock

HOW = {"num_inference_steps": 2, "output_type": "latent", "height": 64, "width": 64}


@pytest.fixture(params=[NEMOPipeline, W2WPipeline])
def pipe(request):
    return request.param.from_pipe(stock("sdxl"))


def test_the_other_pipelines_methods_are_there(pipe):
    text, *_ = pipe.encode_prompt("a cat", device="cpu")
    assert torch.equal(text, stock("sdxl").encode_prompt("a cat", device="cpu")[0])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pipe.no_such_name


def test_another_scheduler_is_sampled_with(pipe):
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    drawn = pipe("a cat", generator=torch.Generator().manual_seed(0), **HOW).images
    own = stock("sdxl")
    own.scheduler = DDIMScheduler.from_config(own.scheduler.config)
    assert torch.equal(drawn, own("a cat", generator=torch.Generator().manual_seed(0), **HOW).images)


def test_another_text_encoder_reads_the_prompts(pipe):
    """It was kept beside the other pipeline, which went on reading with its own."""
    other = stock("sdxl").text_encoder
    torch.nn.init.zeros_(other.get_input_embeddings().weight)
    before = pipe.encode_prompt("a cat", device="cpu")[0]
    pipe.text_encoder = other
    assert pipe.text_encoder is pipe.components["text_encoder"] is other
    assert not torch.equal(pipe.encode_prompt("a cat", device="cpu")[0], before)


def test_a_wrapped_pipeline_is_sampled_with_the_scheduler_it_is_given():
    """It was set on the wrapper, and changed nothing."""
    config = ResolutionTransferConfig((64, 64), (64, 64))
    made, own = ResolutionTransferPipeline.from_pipe(stock("sd"), config), stock("sd")
    made.scheduler = DDIMScheduler.from_config(made.scheduler.config, timestep_spacing="trailing")
    own.scheduler = made.scheduler
    both = (made, ResolutionTransferPipeline.from_pipe(own, config))
    drawn, wanted = (p("a cat", generator=torch.Generator().manual_seed(0), **HOW).images for p in both)
    assert torch.equal(drawn, wanted)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_what_is_around_another_is_given_on_with_its_text_encoders(family):
    """It was refused for the text encoder that it has lent, or put around as if it were a stock pipeline."""
    how = {"num_inference_steps": 2, "output_type": "latent", "height": 64, "width": 64}
    source = stock(family).to(torch.float16)
    first = NEMOPipeline.from_pipe(source)
    for kind in (W2WPipeline, NEMOPipeline, ActivationTapPipeline, EMDOneStepPipeline):
        second = kind.from_pipe(first)
        parts = modules(second)
        assert all(parts[name] is module for name, module in modules(source).items() if name in parts)
    made = [
        p("a cat", generator=torch.Generator().manual_seed(0), **how).images
        for p in (W2WPipeline.from_pipe(first), source)
    ]
    assert torch.equal(*made)


def test_image_to_image_is_given_on_as_such():
    image = StableDiffusionImg2ImgPipeline.from_pipe(stock("sd"), torch_dtype=torch.float32)
    second = W2WPipeline.from_pipe(NEMOPipeline.from_pipe(image))
    assert isinstance(second, W2WPipeline) and isinstance(second, NEMOPipeline) and isinstance(second, type(image))


def test_guidance_stays_where_the_pipeline_is_moved():
    guided = ResolutionTransferPipeline.from_pipe(stock("sd"), ResolutionTransferConfig((64, 64), (64, 64)))
    assert guided.to(torch.float64) is guided and guided.unet.dtype == torch.float64
