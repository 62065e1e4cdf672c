"""A pipeline around another does all that the other does: nothing of a stock pipeline is missing or without effect."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.control.entropy import EntropyConfig
from vitrine.engine.pipelines import EntropyGuidedPipeline, NEMOPipeline, W2WPipeline
from vitrine_tests.machine.stock import stock

HOW = {"num_inference_steps": 2, "output_type": "latent", "height": 64, "width": 64}


@pytest.fixture(params=[NEMOPipeline, W2WPipeline])
def pipe(request):
    return request.param.from_pipe(stock("sdxl"))


def test_bars_are_silenced_and_shown(pipe):
    for off in (True, False):
        pipe.set_progress_bar_config(disable=off)
        with redirect_stderr(io.StringIO()) as printed:
            pipe("a cat", **HOW)
        assert ("it/s" in printed.getvalue() or "s/it" in printed.getvalue()) != off


def test_the_other_pipelines_methods_are_there(pipe):
    text, *_ = pipe.encode_prompt("a cat", device="cpu")
    assert torch.equal(text, pipe._source.encode_prompt("a cat", device="cpu")[0])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pipe.no_such_name


def test_adapters_are_loaded_weighed_and_unloaded(pipe):
    from peft import LoraConfig

    def drawn():
        return pipe("a cat", generator=torch.Generator().manual_seed(0), **HOW).images

    plain = drawn()
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False), "extra")
    pipe.set_adapters(["extra"], [1.0])
    assert pipe.get_active_adapters() == ["extra"] and not torch.equal(drawn(), plain)
    pipe.unload_lora_weights()
    assert torch.equal(drawn(), plain)


def test_another_scheduler_is_sampled_with(pipe):
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    assert pipe._source.scheduler is pipe.scheduler
    drawn = pipe("a cat", generator=torch.Generator().manual_seed(0), **HOW).images
    own = stock("sdxl")
    own.scheduler = DDIMScheduler.from_config(own.scheduler.config)
    assert torch.equal(drawn, own("a cat", generator=torch.Generator().manual_seed(0), **HOW).images)


def test_guidance_stays_where_the_pipeline_is_moved():
    guided = EntropyGuidedPipeline.from_pipe(stock("sd"), EntropyConfig(scale=2.0))
    assert guided.to(torch.float64) is guided and guided.unet.dtype == torch.float64
