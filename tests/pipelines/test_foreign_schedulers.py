"""Schedulers that a pipeline did not come with: every method samples and taps with them, or refuses them beforehand."""

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    IPNDMScheduler,
    UniPCMultistepScheduler,
)
from vitrine.engine.emd import StudentPreset
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import BlockConfig
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    ControlConditionedPipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    ResolutionTransferPipeline,
    W2WPipeline,
)
from vitrine.engine.pipelines.emd import student_scheduler
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.machine import stock as stocks
from vitrine_tests.pipelines.encoded import drawn, source
from vitrine_tests.pipelines.test_nemo_around import some_neurons
from vitrine_tests.pipelines.test_w2w_around import space_on

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
PUBLISHED = {
    "UniPC": lambda **more: UniPCMultistepScheduler(**FLOW, flow_shift=3.0, **more),
    "DPM++": lambda **more: DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0, **more),
}
TABLES = {"Euler": EulerDiscreteScheduler, "IPNDM": IPNDMScheduler}


def tapped(pipe, told):
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    tap = ActivationTapPipeline.from_pipe(pipe)
    made = tap.tap(image, told["prompt"], "vit-block1-out", timestep=300, seeds=1).activations
    return made["vit-block1-out"].tensor


def uses(pipe, told):
    """What each method is asked for: name -> a call without arguments."""
    net, size = pipe.transformer, {"height": told["height"], "width": told["width"]}
    target, train = (told["width"] * 2, told["height"]), (told["width"], told["height"])
    space = space_on(net)
    bare = {k: v for k, v in told.items() if k not in size}
    nemo, w2w, emd = (kind.from_pipe(pipe) for kind in (NEMOPipeline, W2WPipeline, EMDOneStepPipeline))
    return {
        "tap": lambda: tapped(pipe, told),
        "blocked": lambda: drawn(nemo, told, neurons=some_neurons(pipe), block_config=BlockConfig(end_percent=0.5)),
        "statistics": lambda: nemo.calibrate(["a photo of a cat", "a horse"], ["statistics"]),
        "late model": lambda: drawn(w2w, told, space=space, model=w2w.sample_models(space, [1])),
        "one step": lambda: emd(told["prompt"], preset=StudentPreset(timestep=1000.0), seeds=[0], **size),
        "moved": lambda: drawn(
            ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig(target, train)), bare
        ),
    }


ALL = [
    pytest.param(n, s, marks=[] if (n, s) == ("wan", "UniPC") else pytest.mark.nightly)
    for n in ("wan", "flux", "sd3")
    for s in PUBLISHED
]


@pytest.mark.parametrize(("name", "scheduler"), ALL)
def test_flow_solvers_of_several_steps_serve_every_method(name, scheduler):
    pipe, told = source(name)
    before = tapped(pipe, told)
    pipe.scheduler = PUBLISHED[scheduler](use_dynamic_shifting=name == "flux")
    after = uses(pipe, told)
    assert torch.equal(after.pop("tap")(), before)
    plain = drawn(pipe, told)
    for what, use in after.items():
        made = use()
        if what in ("blocked", "late model"):
            assert bool(torch.isfinite(made).all()) and not torch.equal(made, plain), what


REFUSED = [pytest.param(*case, marks=pytest.mark.nightly) for case in (("flux", "IPNDM"), ("sd3", "Euler"))]


@pytest.mark.parametrize(("name", "scheduler"), [("flux", "Euler"), *REFUSED])
def test_every_method_refuses_a_table_of_betas_on_a_flow_model(name, scheduler):
    pipe, told = source(name)
    pipe.scheduler = TABLES[scheduler]()
    for what, use in uses(pipe, told).items():
        calls = []
        handle = pipe.transformer.register_forward_pre_hook(lambda *a, calls=calls: calls.append(1))
        with pytest.raises(VitrineError, match="scheduler: given .*flow model"):
            use()
        handle.remove()
        assert not calls, f"{what}: refused before the first forward"


def test_a_unets_pipelines_refuse_what_they_cannot_scale():
    pipe = stocks.sdxl()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(VitrineError, match="scheduler: given FlowMatchEuler"):
        ControlConditionedPipeline.from_pipe(pipe)("a cat", num_inference_steps=2)
    with pytest.raises(VitrineError, match="scheduler: given a flow"):
        student_scheduler(pipe, "SDXL-Lightning, 4 steps")
