"""Hooks run while a recorder pauses, and a block whose hooks no forward called is refused."""

import _thread
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from vitrine.engine.runtime.forward_hooks import Reached, Unreached, block_of, hook_after, hook_before, run_hooks_inside
from vitrine.engine.runtime.missing_names import missing_names
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests import models
from vitrine_tests.hangs import HANGS

ADDRESS = "mid-vit-block0-cross-v"


@pytest.fixture
def paused():
    """Whether a recorder pauses at the moment."""
    state = []

    @contextmanager
    def pause():
        state.append(True)
        yield
        state.pop()

    end = run_hooks_inside(pause)
    yield state
    end()


def test_hooks_run_while_the_recorder_pauses(paused):
    layer, seen = nn.Linear(2, 2), []
    note = lambda *_: seen.append(bool(paused))  # noqa: E731
    handles = [hook_before(layer, note), hook_after(layer, note)]
    layer(torch.zeros(1, 2))
    assert seen == [True, True] and not paused
    for handle in handles:
        handle.remove()


def test_two_threads_run_one_network(monkeypatch):
    """A run without a method had the other thread's neurons blocked; autograd's threads compute again for all."""
    monkeypatch.setattr("vitrine.engine.runtime.forward_hooks._ANY_THREAD", [])
    net, ended = models.unet(), threading.Barrier(3, timeout=HANGS)
    x, text = torch.randn(1, net.config.in_channels, 16, 16), torch.randn(1, 5, net.config.cross_attention_dim)

    @torch.no_grad()
    def forward():
        return net(x, torch.tensor(3), encoder_hidden_states=text).sample

    plain, found = forward(), {}
    with edit(net, {ADDRESS: torch.zeros_like}):
        edited = forward()

    def run(name, change):
        with edit(net, {ADDRESS: change}) if change else nullcontext():
            ended.wait()
            found[name] = forward()
            ended.wait()

    changes = {"plain": None, "zero": torch.zeros_like, "same": lambda value: value}
    threads = [threading.Thread(target=run, args=pair) for pair in changes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found["plain"], plain) and torch.equal(found["same"], plain)
    assert torch.equal(found["zero"], edited) and not torch.equal(edited, plain)
    layer, seen, done = nn.Linear(2, 2), [], threading.Event()
    handle = hook_after(layer, lambda *_: seen.append(True))
    _thread.start_new_thread(lambda: (layer(torch.zeros(1, 2)), done.set()), ())
    assert done.wait(HANGS) and seen == [True]
    handle.remove()


def test_a_block_whose_forwards_all_ran_in_another_thread_is_refused(monkeypatch):
    monkeypatch.setattr("vitrine.engine.runtime.forward_hooks._ANY_THREAD", [])
    net = models.unet()
    x, text = torch.randn(1, net.config.in_channels, 16, 16), torch.randn(1, 5, net.config.cross_attention_dim)
    with pytest.raises(Unreached, match="1 forwards in other threads.*the thread that runs the network"):  # noqa: SIM117
        with edit(net, {ADDRESS: torch.zeros_like}):
            worker = threading.Thread(target=net, args=(x, torch.tensor(3), text))
            worker.start()
            worker.join()


def test_captures_and_edits_do_what_they_do_without_a_recorder(paused):
    net = models.unet()
    text = torch.randn(1, 5, net.config.cross_attention_dim)
    x, t = torch.randn(1, net.config.in_channels, 16, 16), torch.tensor(3)
    with torch.no_grad(), edit(net, {ADDRESS: torch.zeros_like}), capture(net, ADDRESS) as taps:
        net(x, t, encoder_hidden_states=text)
    assert not taps[ADDRESS].tensor.any()


class Skips(nn.Module):
    """Calls its layer in the first of every two forwards."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(2, 2), 0

    def forward(self, x):
        self.count += 1
        return self.layer(x) if self.count % 2 else x


def test_a_layer_that_no_forward_ran_is_refused():
    net = Skips()
    net.count = 1
    reached = Reached("LoRA")
    reached.watch(net)
    reached.through(net.layer, "layer")
    net(torch.zeros(1, 2))
    with pytest.raises(Unreached, match="LoRA: given 1 layers that 1 forwards never reached: layer"):
        reached.check()
    assert not net._forward_hooks and not net.layer._forward_pre_hooks
    again = Reached("LoRA")
    again.watch(net)
    again.through(net.layer, "layer")
    net(torch.zeros(1, 2))
    again.check()


def test_no_forward_at_all_is_no_fault():
    reached = Reached("edit")
    reached.expect("layer")
    reached.check()


def test_blocks():
    assert block_of("double_stream_blocks.3.block.ff_i.experts.2.w1") == "double_stream_blocks.3"
    assert block_of("x_embedder.proj") == "x_embedder.proj"


def test_the_installed_libraries_have_every_name(monkeypatch):
    from diffusers import DiffusionPipeline

    assert not missing_names()
    monkeypatch.delattr(DiffusionPipeline, "_get_signature_keys")
    assert missing_names() == ["DiffusionPipeline._get_signature_keys"]
