"""Hooks fire in compiled networks as in plain ones, and the compiled code comes back afterwards."""

import pytest
import torch
from vitrine.engine.activations.during import tap_steps
from vitrine.engine.addresses import sites_of
from vitrine.engine.compiled import EagerRuns, is_compiled
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.hooks import capture, edit
from vitrine_tests import models


def compiled_as_a_whole(unet):
    return torch.compile(unet, backend="eager")


def compiled_in_place(unet):
    unet.compile(backend="eager")
    return unet


def compiled_by_blocks(unet):
    for block in unet.up_blocks:
        block.compile(backend="eager")
    return unet


def compiled_forward(unet):
    unet.forward = torch.compile(unet.forward, backend="eager")
    return unet


@pytest.fixture(scope="module", params=[compiled_as_a_whole, compiled_in_place, compiled_by_blocks, compiled_forward])
def unet(request):
    torch._dynamo.reset()
    made = request.param(models.unet(**models.ATTENTION_LAST))
    with torch.no_grad():
        run(made)  # code is made before any hook
    yield made
    torch._dynamo.reset()


@torch.no_grad()
def run(unet):
    g = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 16, 16, generator=g), torch.randn(2, 5, models.TEXT, generator=g)
    return unet(x, torch.tensor(50.0), encoder_hidden_states=text).sample


def place(unet):
    return next(a for a in sites_of(unet) if a.endswith("cross-q"))


def test_captures_and_edits(unet):
    address, before = place(unet), run(unet)
    with capture(unet, address) as taps:
        run(unet)
    with edit(unet, {address: torch.zeros_like}), capture(unet, address) as edited:
        changed = run(unet)
    assert taps[address].tensor.abs().max() > 0 and edited[address].tensor.abs().max() == 0
    assert not torch.equal(changed, before) and torch.equal(run(unet), before)


def test_taps_during_sampling(unet):
    with tap_steps(unet, place(unet), [0]) as record:
        run(unet)
    assert record.calls == 1 and record.timesteps == {0: 50.0}


def test_a_denoiser_of_a_compiled_network(unet):
    from diffusers import DDIMScheduler

    denoiser = Denoiser.from_diffusers(unet, DDIMScheduler())
    g = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 16, 16, generator=g), torch.randn(2, 5, models.TEXT, generator=g)
    with torch.no_grad():
        assert torch.allclose(denoiser.forward(x, 50.0, Condition(text)), run(unet), atol=1e-6)


def test_handles_may_close_in_any_order():
    torch._dynamo.reset()
    calls = []

    def backend(graph, inputs):
        calls.append(1)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    first, second = EagerRuns(), EagerRuns()
    first.remove(), first.remove()
    double(torch.ones(2))
    assert not calls
    second.remove()
    double(torch.ones(2))
    assert calls
    assert not is_compiled(models.shared(models.unet))
