"""Every task on every kind of pipeline is an instance of both classes, and does what diffusers' users expect of it."""

import copy
import inspect
import pickle

import pytest
import torch
from diffusers import AutoencoderTiny, DDIMScheduler, DiffusionPipeline
from vitrine.engine import pipelines
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines.joined import TaskPipeline, joined
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.machine import stock
from vitrine_tests.pipelines.encoded import STEPS, drawn, source

FAMILIES = ("sd", "sdxl", "flux", "sd3", "pixart", "wan")
NAMED = {name: getattr(pipelines, name) for name in pipelines.__all__ if name.endswith("Pipeline")}
TASKS = {name: kind for name, kind in NAMED.items() if issubclass(kind, TaskPipeline)}
SAMPLING = [kind for kind in TASKS.values() if kind._samples_as_stock]
SIZED = ("sd", "sdxl", "pixart")
"""Families that size conditioning is for."""


@pytest.fixture(scope="module")
def made():
    """Family -> (stock pipeline, what a short call takes), made once."""
    known = {}

    def of(family):
        if family not in known:
            size = {"height": 64, "width": 64}
            known[family] = (stock.sd(), {"prompt": "a cat", **size, **STEPS}) if family == "sd" else source(family)
            known[family][0].set_progress_bar_config(disable=True)
        return known[family]

    return of


def on(task, pipe, told):
    """The task on a pipeline; resolution transfer to the size that it samples at."""
    if task is not pipelines.ResolutionTransferPipeline:
        return task.from_pipe(pipe)
    size = (told["width"], told["height"])
    return task.from_pipe(pipe, ResolutionTransferConfig(size, size))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TASKS)
def test_a_task_on_a_pipeline_is_an_instance_of_both(name, family, made):
    task, (pipe, told) = TASKS[name], made(family)
    if name == "ControlConditionedPipeline" and family not in SIZED:
        with pytest.raises(VitrineError, match="another model family"):
            on(task, pipe, told)
        return
    ours = on(task, pipe, told)
    assert isinstance(ours, task) and isinstance(ours, type(pipe)) and not isinstance(pipe, task)
    assert type(ours).__name__ == type(pipe).__name__ and type(ours) is joined(task, type(pipe))
    assert all(ours.components[part] is module for part, module in pipe.components.items())
    again = on(task, pipe, told)
    assert type(again) is type(ours) and again is not ours
    ours.scheduler = DDIMScheduler()
    assert pipe.scheduler is not ours.scheduler and again.scheduler is pipe.scheduler
    with pytest.raises(VitrineError, match="from_pipe"):
        task(**pipe.components)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", SAMPLING, ids=lambda task: task.__name__)
def test_its_call_has_the_arguments_of_both(task, family, made):
    pipe, told = made(family)
    ours = on(task, pipe, told)
    parameters, theirs = inspect.signature(ours.__call__).parameters, inspect.signature(pipe.__call__).parameters
    assert set(theirs) <= set(parameters) and list(parameters)[0] == list(theirs)[0]
    assert all(parameters[name].default == p.default for name, p in theirs.items())
    assert type(pipe).__call__.__doc__.strip().split("\n")[0] in type(ours).__call__.__doc__


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_on_each_other_sample_as_the_stock_pipeline_and_call_back(family, made):
    pipe, told = made(family)
    ours, steps = pipe, []
    for task in SAMPLING:
        ours = on(task, ours, told)
    assert all(isinstance(ours, task) for task in SAMPLING) and isinstance(ours, type(pipe))

    def step_end(caller, step, timestep, values):
        steps.append(caller)
        return values

    wanted = drawn(pipe, told)
    assert torch.equal(drawn(ours, told), wanted)
    if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:  # PixArt's stock pipeline has none
        return
    assert torch.equal(drawn(ours, told, callback_on_step_end=step_end), wanted)
    assert len(steps) == told["num_inference_steps"] and steps[0] is ours
    halved = drawn(ours, told, callback_on_step_end=lambda p, i, t, values: {"latents": values["latents"] / 2})
    assert not torch.equal(halved, wanted)


@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_and_pickles_are_of_the_same_class(family, copied, made):
    pipe, told = made(family)
    ours = pipelines.W2WPipeline.from_pipe(pipelines.NEMOPipeline.from_pipe(pipe, size=(64, 64)))
    second = copied(ours)
    assert type(second) is type(ours) and second.predicted_size == (64, 64)
    assert torch.equal(drawn(second, told), drawn(pipe, told))


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_saved_folder_is_the_stock_pipelines(family, made, tmp_path):
    pipe, _ = made(family)
    ours = pipelines.W2WPipeline.from_pipe(pipelines.NEMOPipeline.from_pipe(pipe))
    ours.save_pretrained(tmp_path)
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is type(pipe)
    assert isinstance(pipelines.NEMOPipeline.from_pretrained(tmp_path), type(pipe))


def test_adapters_of_a_joined_pipeline_are_its_own(made):
    pipe = stock.sdxl()
    ours = pipelines.NEMOPipeline.from_pipe(pipe)
    assert ours.load_lora_weights.__func__ is type(pipe).load_lora_weights
    half = pipelines.NEMOPipeline.from_pipe(pipe, torch_dtype=torch.bfloat16)
    assert half.unet is pipe.unet and pipe.unet.dtype == torch.bfloat16
    with pytest.raises(VitrineError, match="takes no others"):
        pipelines.NEMOPipeline.from_pipe(pipe, no_such_part=None)


def test_a_tiny_autoencoder_is_read_with():
    pipe, image = stock.sd(), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    tiny = AutoencoderTiny(
        decoder_block_out_channels=(8, 8, 8),
        encoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    ).eval()
    ours = pipelines.NEMOPipeline.from_pipe(pipe, vae=tiny)
    assert ours.vae is tiny and pipe.vae is not tiny and ours._adapter.factor == 4
    latents = ours.latents(image)
    with torch.no_grad():
        assert torch.equal(latents, tiny.encode(image * 2 - 1).latents * tiny.config.scaling_factor)
    assert ours("a cat", num_inference_steps=2, height=64, width=64, output_type="pt").images.shape == (1, 3, 64, 64)
    with pytest.raises(VitrineError, match="one latent, not as a distribution"):
        ours._adapter.encode(image, "sample")
