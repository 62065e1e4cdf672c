"""Every task on every kind of pipeline is an instance of both classes, and does what diffusers' users expect of it."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from diffusers import AutoencoderTiny, DDIMScheduler, DiffusionPipeline
from vitrine.engine import pipelines
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines.joined import TaskPipeline, joined
from vitrine.engine.pipelines.nemo_prompts import latents_of
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.machine import stock
from vitrine_tests.machine.calls import _checkpoint_file
from vitrine_tests.machine.modes import difference, on_the_cpu, where
from vitrine_tests.machine.pretend import NAME, Accelerator
from vitrine_tests.pipelines.encoded import STEPS, backbone, drawn, source

FAMILIES = ("sd", "sdxl", "flux", "sd3", "pixart", "wan")
TASKS = {name: getattr(pipelines, name) for name in pipelines.__all__ if name.endswith("Pipeline")}
SAMPLING = [kind for kind in TASKS.values() if kind._samples_as_stock]
SIZED = ("sd", "sdxl", "pixart")
"""Families that size conditioning is for."""
ROUNDING = 1e-5
"""Of weights that lie elsewhere in memory."""
EVERY_DAY = [(name, FAMILIES[number % len(FAMILIES)]) for number, name in enumerate(TASKS)]
TABLE = [
    pytest.param(name, family, id=f"{name}-{family}", marks=() if (name, family) in EVERY_DAY else pytest.mark.nightly)
    for name in TASKS
    for family in FAMILIES
    if name != "ControlConditionedPipeline" or family in SIZED
]
OWN_ARGUMENTS = {
    pipelines.EMDOneStepPipeline: ("num_inference_steps", "num_frames", "use_resolution_binning"),
    pipelines.ControlConditionedPipeline: ("use_resolution_binning",),
}
"""Tasks that sample themselves, and arguments of the stock calls that they do not take."""


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


# --- what diffusers' users do with a pipeline, of each task on each family ---------------------------------------
@pytest.fixture
def each(made):
    """(task, stock pipeline, the task on a copy of it, what a short call of the task takes)."""

    def of(name, family):
        task, (pipe, told) = TASKS[name], made(family)
        if task is pipelines.ControlConditionedPipeline and family == "pixart":
            pipe = stock.stock("pixart-1024")  # the one with size inputs
        ours = on(task, copy.deepcopy(pipe), told)
        told = {k: v for k, v in told.items() if k not in OWN_ARGUMENTS.get(task, ())}
        if task is pipelines.ControlConditionedPipeline and family == "sd":
            told["checkpoint"] = ours.load_control(_checkpoint_file())
        return task, pipe, ours, told

    return of


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_it_is_saved_as_the_stock_pipeline_and_loaded_as_both(name, family, each, tmp_path):
    task, pipe, ours, told = each(name, family)
    assert isinstance(ours, DiffusionPipeline) and ours.components.keys() == pipe.components.keys()
    ours.save_pretrained(tmp_path)
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is type(pipe)
    size = (told["width"], told["height"])
    settings = [ResolutionTransferConfig(size, size)] if task is pipelines.ResolutionTransferPipeline else []
    again = task.from_pretrained(tmp_path, *settings)
    again.set_progress_bar_config(disable=True)
    assert type(again) is type(ours) and isinstance(again, type(pipe))
    assert difference([drawn(again, told)], [drawn(ours, told)]) < ROUNDING
    assert again.to(torch.float16) is again
    assert {part.dtype for part in stock.modules(again).values()} == {torch.float16}


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_it_is_offloaded_as_the_stock_pipeline(name, family, each):
    _, _, ours, told = each(name, family)
    wanted, before = drawn(ours, told), where(ours)
    with Accelerator():
        ours.enable_model_cpu_offload(device=NAME)
        assert ours._execution_device.type == NAME
        made = on_the_cpu([drawn(ours, told)])
        assert where(ours) == before, "models were left on the device"
    assert difference(made, [wanted]) < ROUNDING


@pytest.mark.parametrize(("name", "family"), TABLE)
def test_it_takes_loras_as_the_stock_pipeline(name, family, each):
    _, pipe, ours, told = each(name, family)
    if not hasattr(pipe, "load_lora_weights"):  # PixArt's stock pipeline
        assert not hasattr(ours, "load_lora_weights")
        return
    part = "transformer" if getattr(pipe, "unet", None) is None else "unet"
    path, layer = next((n, m) for n, m in backbone(ours).named_modules() if n.endswith("to_v"))
    generator = torch.Generator().manual_seed(0)
    factors = {"lora_A": (2, layer.in_features), "lora_B": (layer.out_features, 2)}
    lora = {f"{part}.{path}.{f}.weight": torch.randn(s, generator=generator) for f, s in factors.items()}
    before = drawn(ours, told)
    ours.load_lora_weights(lora, adapter_name="own")
    assert ours.get_active_adapters() == ["own"] and not torch.equal(drawn(ours, told), before)
    ours.unload_lora_weights()
    assert torch.equal(drawn(ours, told), before)


def test_names_of_a_task_are_its_own():
    """Where two tasks, or a task and a stock pipeline, had one name, one of both ran the other's code."""
    shared = {"from_pipe", "_check", "_choices", "_needed", "_samples_as_stock"}
    tasks = [kind for kind in TaskPipeline.__subclasses__() if kind.__module__.startswith("vitrine.engine")]
    own = {kind: {name for name in vars(kind) if not name.startswith("__")} - shared for kind in tasks}
    for first, second in itertools.combinations(tasks, 2):
        assert not own[first] & own[second], (first, second)
    theirs = {name for family in FAMILIES for name in dir(stock_class(family))}
    for kind in (*tasks, *(child for task in tasks for child in task.__subclasses__())):
        names = {name for name in vars(kind) if not name.startswith("__")} - shared
        assert not names & theirs, kind


def stock_class(family):
    maker = stock.MAKERS.get(family)
    return type(maker() if maker else source(family)[0])


def test_parts_are_cast_and_replaced_by_name():
    pipe = stock.sdxl()
    half = pipelines.NEMOPipeline.from_pipe(pipe, torch_dtype=torch.bfloat16)
    assert half.unet is pipe.unet and pipe.unet.dtype == torch.bfloat16
    with pytest.raises(VitrineError, match="takes no others"):
        pipelines.NEMOPipeline.from_pipe(pipe, no_such_part=None)


def test_a_task_that_only_looks_leaves_the_call_of_the_one_below(made):
    pipe, _ = made("sd")
    below = pipelines.EMDOneStepPipeline.from_pipe(pipe)
    ours = pipelines.SegmentationPipeline.from_pipe(pipelines.CorrespondencePipeline.from_pipe(below))
    told = {"prompt": "a cat", "seeds": [1], "output_type": "latent"}
    assert torch.equal(ours(**told).images, below(**told).images)
    assert {"tap", "match", "segment", "rank", "load_student"} <= set(dir(ours))


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
    latents = latents_of(ours, image)
    with torch.no_grad():
        assert torch.equal(latents, tiny.encode(image * 2 - 1).latents * tiny.config.scaling_factor)
    assert ours("a cat", num_inference_steps=2, height=64, width=64, output_type="pt").images.shape == (1, 3, 64, 64)
    with pytest.raises(VitrineError, match="one latent, not as a distribution"):
        ours._adapter.encode(image, "sample")
