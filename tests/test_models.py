"""The small networks themselves: a seed makes the same one, and the check for hooks finds them."""

import pytest
import torch
from vitrine_tests import models

MAKERS = [models.unet, models.unet_v, models.unet_xl, models.dit, models.pixart, models.sd3, models.flux]


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_makes_the_same_network(make):
    first, second = make().state_dict(), make().state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], v) for k, v in make(seed=5).state_dict().items())
    assert models.shared(make) is models.shared(make) and not models.shared(make).training


def test_vae_and_text_encoders():
    assert models.vae().encode(torch.zeros(1, 3, 16, 16)).latent_dist.mean.shape == (1, 4, 2, 2)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert models.text_encoder()(tokens).last_hidden_state.shape == (1, 5, models.TEXT)
    assert models.text_encoder(projected=True)(tokens).text_embeds.shape == (1, models.POOLED)


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
