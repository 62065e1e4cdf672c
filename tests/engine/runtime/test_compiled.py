"""Hooks fire in compiled networks as in plain ones, and the compiled code comes back afterwards."""

import pytest
import torch
from vitrine.engine.activations.tap_during_sampling import tap_steps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo import NeuronSet, block, value_sites
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.compiled import EagerRuns, is_compiled
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests import models
from vitrine_tests.lanes import nightly_but


def compiled_as_a_whole(unet):
    return torch.compile(unet, backend="eager")


def compiled_in_place(unet):
    unet.compile(backend="eager")
    return unet


def compiled_by_blocks(unet):
    for stage in unet.up_blocks:
        stage.compile(backend="eager")
    return unet


def compiled_forward(unet):
    unet.forward = torch.compile(unet.forward, backend="eager")
    return unet


WAYS = [compiled_as_a_whole, compiled_in_place, compiled_by_blocks, compiled_forward]


@pytest.fixture(scope="module", params=nightly_but(WAYS, [compiled_in_place]))
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


@pytest.mark.nightly
def test_a_denoiser_of_a_compiled_network(unet):
    from diffusers import DDIMScheduler

    denoiser = Denoiser.from_diffusers(unet, DDIMScheduler())
    g = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 16, 16, generator=g), torch.randn(2, 5, models.TEXT, generator=g)
    with torch.no_grad():
        assert torch.allclose(denoiser.forward(x, 50.0, Condition(text)), run(unet), atol=1e-6)


@torch.no_grad()
def test_blocking_in_whatever_order_network_and_compiler_are_called():
    """Compiled before or while blocked, opened on the network or its compiled twin: blocked inside, not after."""
    torch._dynamo.reset()
    unet = models.unet(**models.ATTENTION_LAST)
    neurons = NeuronSet({site.address: tuple(range(8)) for site in value_sites(unet, "all")})
    plain = run(unet)
    with block(unet, neurons):
        blocked = run(unet)
    assert not torch.equal(plain, blocked)
    early, late = (torch.compile(unet, backend="eager") for _ in range(2))
    assert torch.equal(run(early), plain)
    for opened, called in ((unet, early), (unet, late), (early, unet), (late, early)):
        with block(opened, neurons):
            assert torch.equal(run(called), blocked)
        assert torch.equal(run(called), plain)
    with block(unet, neurons):
        inside = torch.compile(unet, backend="eager")
        assert torch.equal(run(inside), blocked)
    assert torch.equal(run(inside), plain)
    torch._dynamo.reset()


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
