"""A pipeline with the transfer in it for good: it follows the new positions whatever was done to the first one."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.resolution import ResolutionTransferConfig, transferred_copy
from vitrine.engine.runtime.compiled import EagerRuns
from vitrine_tests.lanes import nightly_but
from vitrine_tests.pipelines.test_resolution import flux, run

CONFIG = ResolutionTransferConfig((48, 64), (32, 32))


def plainly(pipe):
    return pipe


def compiled_as_a_whole(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    return pipe


def compiled_in_place(pipe):
    pipe.transformer.compile(backend="eager")
    return pipe


def compiled_forward(pipe):
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend="eager")
    return pipe


def offloaded(pipe):
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
    return pipe


@pytest.mark.parametrize("treated", nightly_but([plainly, compiled_as_a_whole, compiled_in_place], [plainly]))
def test_the_copy_follows_its_positions_and_the_first_one_stays(treated):
    torch._dynamo.reset()
    pipe, settings = flux()
    settings |= {"height": 64, "width": 48}
    before = run(pipe, settings)
    copied, _ = transferred_copy(pipe, CONFIG)
    moved = run(copied, settings)
    assert not torch.equal(before, moved)

    again = run(treated(pipe), settings)
    open_before = EagerRuns._open
    copied, _ = transferred_copy(pipe, CONFIG)
    assert EagerRuns._open == open_before, "compiled code of everything else may run on"
    assert torch.allclose(run(copied, settings), moved, atol=1e-5)
    assert torch.equal(run(pipe, settings), again)
    torch._dynamo.reset()


@pytest.mark.parametrize("treated", [compiled_forward, offloaded])
def test_a_replaced_forward_is_refused(treated):
    """It belongs to the first network: the copy would run that one, and ignore its own positions without a word."""
    with pytest.raises(VitrineError, match="a FluxTransformer2DModel with its forward replaced"):
        transferred_copy(treated(flux()[0]), CONFIG)
    torch._dynamo.reset()
