"""The check for hooks finds those that stay."""

import pytest
from vitrine_tests import models


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_no_hooks_left_finds_what_stayed(no_hooks_left, kind):
    network = models.shared(models.unet)
    no_hooks_left(network)
    place = network.conv_out
    if kind == "forward":
        place.forward = lambda *a: None
    else:
        handle = getattr(place, kind)(lambda *a: None)
    with pytest.raises(AssertionError, match="conv_out keeps"):
        no_hooks_left(network)
    if kind == "forward":
        del place.forward
    else:
        handle.remove()
