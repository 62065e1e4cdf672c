"""Control in real diffusers models at tiny size: Eq. 1 by hooks."""

import threading

import pytest
import torch
from vitrine.engine.control import (
    AddedVector,
    ControlEmbedder,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    Injection,
    control_guidance,
    control_width,
    gamma,
    injected,
)
from vitrine.engine.errors import VitrineError
from vitrine_tests.engine.control_networks import MODELS, TEXT, TIME, T, X, build, seen, unet
from vitrine_tests.hangs import HANGS

pytestmark = pytest.mark.rounding


def controls(net, zero_init=False, **change):
    spec = ControlSpec()
    torch.manual_seed(7)
    told = spec.reference() | {"flip": [0, 1], "crop_top": 0.3, "height": [400, 900]} | change
    return ControlEmbedder(spec, control_width(net), zero_init).requires_grad_(False), spec.rows(told)


# --- Eq. 1 in the network -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_c_emb_is_added_to_the_timestep_embedding(name, no_hooks_left):
    net, call = build(name)
    made, rows = controls(net)
    before, plain = seen(net, TIME[name], lambda: call(net, X, T))
    config = GammaConfig(alpha=2.0)
    with Injection(net, made, rows, config):
        during, told = seen(net, TIME[name], lambda: call(net, X, T))
    high, low = made.terms(rows)
    weight = torch.tensor([gamma(0.7, alpha=2.0), gamma(0.2, alpha=2.0)])[:, None].float()
    assert torch.allclose(told - plain, high + weight * low, atol=1e-6)
    assert float((during - before).abs().max()) > 1e-6
    assert torch.equal(call(net, X, T), before)
    no_hooks_left(net)


@pytest.mark.parametrize("name", MODELS)
def test_zero_and_dropped_control_leave_the_output(name):
    net, call = build(name)
    before = call(net, X, T)
    made, rows = controls(net, zero_init=True)
    with Injection(net, made, rows, GammaConfig()):
        assert torch.equal(call(net, X, T), before)
    made, rows = controls(net)
    with Injection(net, made, rows, GammaConfig(), drop=torch.tensor([True, False])):
        half = call(net, X, T)
    assert torch.equal(half[0], before[0]) and not torch.equal(half[1], before[1])


def test_alpha_matters_for_size_alone_and_crop_acts_early():
    net, call = build("pixart")
    made, rows = controls(net)
    first = torch.full((2,), 999.0)
    late = torch.full((2,), 200.0)

    def run(rows, alpha, t, drop=None):
        with Injection(net, made, rows, GammaConfig(alpha=alpha), drop):
            return call(net, X, t)

    no_low = torch.tensor([[False, True]] * 2)
    assert torch.equal(run(rows, 1.0, late, no_low), run(rows, 8.0, late, no_low))
    assert not torch.equal(run(rows, 1.0, late), run(rows, 8.0, late))
    cropped = controls(net, crop_top=0.9)[1]
    assert float((run(cropped, 8.0, first) - run(rows, 8.0, first)).abs().max()) > 1e-6
    resized = controls(net, height=[100, 5000])[1]
    assert torch.equal(run(resized, 8.0, first), run(rows, 8.0, first))


def test_one_timestep_for_all_rows_may_be_a_plain_number():
    net, call = build("unet")
    made, rows = controls(net)
    with Injection(net, made, rows, GammaConfig()):
        assert torch.equal(call(net, X, 500), call(net, X, torch.tensor([500, 500])))
        assert torch.equal(call(net, X, torch.tensor(500)), call(net, X, 500))


def test_hooks_go_after_an_error_and_rows_must_match():
    net, call = build("unet")
    made, rows = controls(net)
    before = call(net, X, T)
    with pytest.raises(VitrineError, match="2 values"), Injection(net, made, rows, GammaConfig()):
        net(X[:1].expand(3, -1, -1, -1), 5, TEXT[:1, :, :8].expand(3, -1, -1))
    block = Injection(net, made, rows[:1], GammaConfig())
    with block, pytest.raises(VitrineError, match="open already"):
        block.__enter__()
    assert torch.equal(call(net, X, T), before)
    with pytest.raises(VitrineError, match="width"):
        Injection(net, ControlEmbedder(ControlSpec(), 5), rows, GammaConfig())
    with pytest.raises(VitrineError, match="vector"):
        AddedVector(net, torch.zeros(2, 5))
    with pytest.raises(VitrineError, match="accepted"):
        control_width(torch.nn.Linear(2, 2))


def test_threads_keep_their_own_clock():
    net, call = build("unet")
    made, rows = controls(net)
    times = [torch.full((2,), float(t)) for t in (900, 600, 300, 0)]
    found = {}
    with Injection(net, made, rows, GammaConfig()):
        alone = [call(net, X, t) for t in times]
        gate = threading.Barrier(4)

        def wait(module, args):
            gate.wait(HANGS)  # all clocks are set before any embedding is made

        handle = net.time_embedding.register_forward_pre_hook(wait)

        def task(i):
            found[i] = call(net, X, times[i])

        work = [threading.Thread(target=task, args=(i,)) for i in range(4)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        handle.remove()
    assert all(torch.equal(found[i], alone[i]) for i in range(4))


@pytest.mark.parametrize("name", MODELS)
def test_injection_holds_under_gradient_checkpointing(name):
    net, call = build(name)
    made, rows = controls(net)
    made.requires_grad_(True)
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            net.enable_gradient_checkpointing()
        made.zero_grad()
        with Injection(net, made, rows, GammaConfig()):  # open until the backward pass is done
            loss = call(net, X, T).square().mean()
            # On a GPU the blocks are recomputed in a thread of autograd's own.
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
        grads.append([p.grad.clone() for p in made.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*grads, strict=True))
    assert any(bool((g != 0).any()) for g in grads[0])
    network = injected(net, lambda x, t, s: call(net, x, t))
    assert network(X, T, TEXT, torch.zeros(2, control_width(net))).shape[0] == 2


def test_the_skip_rule_holds_in_a_network():
    net, call = build("pixart")
    made, rows = controls(net)
    start = torch.full((2,), 1000.0)  # gamma = 0

    def predict(control, semantics):
        drop = torch.tensor([[True, not control]] * 2)  # the high-level control is null
        with Injection(net, made, rows, GammaConfig(), drop):
            return call(net, X, start, text=TEXT if semantics else torch.zeros_like(TEXT))

    config = GuidanceConfig(3.0, 1.375)
    slow, quick = control_guidance(predict, config, 0.0), control_guidance(predict, config, 0.0, high_is_null=True)
    assert (slow.evaluations, quick.evaluations) == (3, 2) and torch.equal(slow.prediction, quick.prediction)


def test_what_is_told_is_embedded_once_a_run_and_anew_in_training(monkeypatch):
    net, call = unet()
    made, spec = ControlEmbedder(ControlSpec(), control_width(net)), ControlSpec()
    counted, terms = [], ControlEmbedder.terms

    def counting(self, *args):
        counted.append(torch.is_grad_enabled())
        return terms(self, *args)

    monkeypatch.setattr(ControlEmbedder, "terms", counting)
    block = Injection(net, made, spec.rows(spec.reference()), GammaConfig(), torch.tensor([False, True]))
    with torch.no_grad():
        for t in (900.0, 500.0, 100.0):
            with block:
                found = call(net, X, torch.full((2,), t))
            with Injection(net, made, spec.rows(spec.reference()), GammaConfig(), torch.tensor([False, True])):
                assert torch.equal(found, call(net, X, torch.full((2,), t)))
    assert len(counted) == 1 + 3
    with block:
        call(net, X, T).sum().backward()
    assert counted[-1] and made.h[2].weight.grad.abs().sum() > 0
