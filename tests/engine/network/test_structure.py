"""What is found once a network, and when it is found again."""

import gc
import weakref

import pytest
import torch
from torch import nn
from vitrine.engine.families import layout_of
from vitrine.engine.network.structure import once
from vitrine.engine.runtime.compat_torch import module_at, modules_in
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine.engine.tracing.fingerprint import fingerprint_of
from vitrine_tests import models

MAKERS = (models.unet, models.unet_xl, models.pixart, models.sd3, models.flux)


def kinds(network):
    """What is looked for; its calls are counted."""
    kinds.calls += 1
    return [type(module).__name__ for module in network.modules()]


@pytest.fixture(autouse=True)
def counted():
    kinds.calls = 0


def small():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def changed(network, change):
    """Whether a change of the network lets it be looked at again, with the right result."""
    assert once(kinds, network) == once(kinds, network)
    before = kinds.calls
    change()
    found = once(kinds, network)
    assert found == [type(module).__name__ for module in network.modules()]
    return kinds.calls > before


def test_it_is_found_once():
    network = small()
    for _ in range(5):
        once(kinds, network)
    assert kinds.calls == 1
    once(kinds, small())
    assert kinds.calls == 2


def test_weights_modes_and_hooks_change_nothing():
    network = small()

    def change():
        network[0].weight.data.mul_(2)
        network.double().eval()
        network[1].register_forward_hook(lambda *_: None)

    assert not changed(network, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.append(nn.Tanh()),
        lambda n: n.pop(1),
        lambda n: n.__setitem__(0, nn.Linear(2, 2)),
        lambda n: n[1].__setitem__(1, nn.Conv2d(2, 2, 1)),
        lambda n: n[1].register_module("more", nn.Tanh()),
        lambda n: setattr(n[0], "__class__", type("Other", (nn.Linear,), {})),
        lambda n: n.insert(0, n.pop(1)),
        lambda n: setattr(n, "0", None),
    ],
)
def test_other_modules_are_seen(change):
    network = small()
    assert changed(network, lambda: change(network))


def test_a_module_that_took_the_place_of_a_dead_one_is_seen():
    """Its address in memory may be the same."""
    network = small()
    for _ in range(50):
        once(kinds, network)
        before = kinds.calls
        del network[1][1]
        network[1].append(nn.Linear(2, 2))
        once(kinds, network)
        assert kinds.calls == before + 1


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_kept_keeps_no_network(make):
    network = make()
    sites_of(network), fingerprint_of(network)
    assert layout_of(network) is layout_of(network)
    alive = weakref.ref(network)
    del network
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("make", MAKERS)
def test_quick_walks_are_torchs_own(make):
    network = make()
    assert list(modules_in(network)) == list(network.modules())
    for path, module in network.named_modules():
        assert module_at(network, path) is module
    with pytest.raises(AttributeError):
        module_at(network, "no.such.layer")


def test_an_adapter_is_seen_and_taken_out():
    from peft import LoraConfig, inject_adapter_in_model

    network = models.unet()
    plain = sites_of(network)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_k", "to_v"]), network)
    assert sites_of(network) == plain
    network.fuse_qkv_projections()
    with pytest.raises(ValueError, match="fused"):
        sites_of(network)
    network.unfuse_qkv_projections()
    assert sites_of(network) == plain


def test_whole_addresses_are_looked_up(monkeypatch):
    """962 addresses of a network were compared with 962 others."""
    from vitrine.engine.tracing import address_patterns

    def compared(*_):
        raise AssertionError("a whole address was compared with others")

    network = models.unet()
    every = list(sites_of(network))
    monkeypatch.setattr(address_patterns.fnmatch, "filter", compared)
    assert [site.address for site in resolve(network, every[::-1])] == every
    assert [site.address for site in resolve(network, f"{every[3]}, {every[1]} {every[3]}")] == [every[1], every[3]]
    with pytest.raises(ValueError, match="Did you mean"):
        resolve(network, every[3] + "x")
    monkeypatch.undo()
    assert len(resolve(network, "*")) == len(every)


@pytest.mark.parametrize("write", [lambda w: w.data.mul_(1.5), lambda w: w.data.copy_(torch.ones_like(w))])
def test_a_fingerprint_is_of_the_weights_as_they_are(write):
    """Writes through ``.data`` leave no trace but the numbers themselves."""
    network = models.unet()
    value = next(module_at(network, s.path) for a, s in sites_of(network).items() if a.endswith("-cross-v"))
    kept, before = value.weight.detach().clone(), fingerprint_of(network)
    write(value.weight)
    assert fingerprint_of(network) != before
    value.weight.data.copy_(kept)
    assert fingerprint_of(network) == before
