"""Captures inside captures, with early exit: each ends its own forwards and nobody else's."""

import pytest
import torch
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models

FIRST, MIDDLE, LAST = "down-level0-repeat0-res-out", "mid-vit-out", "up-level1-repeat0-res-out"


@pytest.fixture
def unet(no_hooks_left):
    network = models.unet()
    no_hooks_left(network)
    return network


@pytest.fixture
def forward(unet):
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, models.TEXT)

    def run():
        with torch.no_grad():
            return unet(x, 50, encoder_hidden_states=text).sample

    return run


@pytest.fixture
def plain(unet, forward):
    with capture(unet, [FIRST, MIDDLE, LAST]) as taps:
        forward()
    return {address: activation.tensor for address, activation in taps.activations.items()}


def same(capture, plain, *addresses):
    tensors = {address: activation.tensor for address, activation in capture.activations.items()}
    return set(tensors) == set(addresses) and all(torch.equal(tensors[a], plain[a]) for a in addresses)


def test_an_inner_exit_ends_its_forward_and_leaves_the_outer_capture_open(unet, forward, plain):
    output = "no forward has ended"
    with capture(unet, [FIRST, MIDDLE, LAST], early_exit=True) as outer:
        with capture(unet, MIDDLE, early_exit=True) as inner:
            output = forward()
        assert output == "no forward has ended", "the inner exit ends the forward"
        assert same(inner, plain, MIDDLE) and same(outer, plain, FIRST, MIDDLE)
        output = forward()
        pytest.fail("the outer exit ends its block")
    assert same(outer, plain, FIRST, MIDDLE, LAST) and same(inner, plain, MIDDLE)
    assert output == "no forward has ended"


def test_an_outer_exit_passes_through_an_inner_capture(unet, forward, plain):
    with capture(unet, MIDDLE, early_exit=True) as outer:
        with capture(unet, [FIRST, LAST], early_exit=True) as inner:
            forward()
        pytest.fail("the exit belongs to the outer block")
    assert same(outer, plain, MIDDLE) and same(inner, plain, FIRST)


@pytest.mark.parametrize("places", [(LAST, MIDDLE, FIRST), (MIDDLE, FIRST, LAST), (FIRST, MIDDLE, LAST)])
def test_of_three_the_one_that_is_complete_first_ends_the_forward(unet, forward, plain, places):
    captures = {place: capture(unet, place, early_exit=True) for place in places}
    outer, middle, inner = captures.values()
    with outer, middle, inner:
        forward()
    assert same(captures[FIRST], plain, FIRST)
    assert not captures[MIDDLE].activations and not captures[LAST].activations


def test_an_exit_needs_no_helper_and_comes_again(unet, forward, plain):
    calls = []
    handle = unet.conv_out.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        with capture(unet, FIRST, early_exit=True) as taps:
            forward()
        assert same(taps, plain, FIRST) and not calls
    assert torch.equal(forward(), forward()) and len(calls) == 2
    handle.remove()


def test_without_early_exit_nested_captures_see_the_same(unet, forward, plain):
    with capture(unet, [FIRST, LAST]) as outer, capture(unet, MIDDLE) as inner:
        assert forward() is not None
    assert same(outer, plain, FIRST, LAST) and same(inner, plain, MIDDLE)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_another_error_goes_through_both_and_leaves_no_hooks(unet, forward, error, no_hooks_left):
    def fail(activation):
        raise error("stop")

    outer = capture(unet, LAST, early_exit=True)
    inner = capture(unet, FIRST, early_exit=True, reduce=fail)
    with pytest.raises(error, match="stop"), outer, inner:
        forward()
    assert not outer.activations and not inner.activations
    no_hooks_left(unet)
    assert torch.isfinite(forward()).all()
