"""Every family with a tiny twin in ``tests/families``: one address is one tensor in both libraries, and edits agree."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, bake, block, value_sites
from vitrine.engine.nemo.sites import value_activations
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.fingerprint import fingerprint_of, width_of
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests.families.twin import NAMES, EqualEpsilon, comfyui_twin, inputs, network, twin
from vitrine_tests.lanes import nightly_but

EQUAL, UNEQUAL = 1e-6, 2e-5
"""Largest difference relative to the largest number: where qk-norm's epsilon is set equal, and as the libraries are."""


def drift(a, b):
    return float((a - b).abs().max() / b.abs().max())


class Twins:
    """Both networks of a family, and one input for both."""

    def __init__(self, name):
        self.name, self.ours = name, network(name)
        self.theirs = comfyui_twin(name, self.ours)
        self.denoiser = Denoiser.from_diffusers(self.ours, FlowMatchEulerDiscreteScheduler())
        self.x, self.t, self.cond = inputs(name)

    def run_ours(self):
        return self.denoiser.forward(self.x, self.t, self.cond)

    def run_theirs(self):
        t = torch.full((len(self.x),), self.t)
        return twin(self.name).run(self.theirs, self.x, t, self.cond)

    def taps(self):
        """(output, activations) of each."""
        with torch.no_grad(), capture(self.ours, "*") as a, capture(self.theirs, "*") as b:
            ours, theirs = self.run_ours(), self.run_theirs()
        return (ours, a.activations), (theirs, b.activations)


@pytest.fixture(scope="module", params=nightly_but(NAMES))
def twins(comfy, request):
    with torch.no_grad():
        return Twins(request.param)


def test_one_address_is_one_tensor(twins, no_hooks_left, record_property):
    no_hooks_left(twins.ours, twins.theirs)
    assert list(sites_of(twins.ours)) == list(sites_of(twins.theirs))
    limits = {UNEQUAL: twins.taps()}
    with EqualEpsilon(twins.name, twins.ours):
        limits[EQUAL] = twins.taps()
    for limit, ((out, a), (other, b)) in limits.items():
        assert set(a) == set(b) == set(sites_of(twins.ours))
        for address in a:
            assert a[address].grid == b[address].grid and a[address].tensor.shape == b[address].tensor.shape, address
        errors = {address: drift(b[address].tensor, a[address].tensor) for address in a} | {"output": drift(other, out)}
        for address in (a for a in errors if a.endswith("-map") and limit == EQUAL):
            errors[address] /= 2  # a softmax magnifies the rounding of its scores
        limit *= getattr(twin(twins.name), "ROUNDING", 1)
        worst = max(errors, key=errors.get)
        record_property(f"worst at {limit:g}", f"{worst} {errors[worst]:.1e} of {len(errors)}")
        assert errors[worst] <= limit, (limit, worst, errors[worst])


def test_edits_agree_and_leave_no_trace(twins):
    """One row's values zeroed: image tokens, then text tokens; the other row stays as it was, and all of it after."""
    values = [a for a in sites_of(twins.ours) if a.endswith("-v") and "block0" in a]
    assert len(values) > 1
    rows, runs = torch.tensor([False, True]), (twins.run_ours, twins.run_theirs)
    leak = EQUAL if getattr(twin(twins.name), "EXPERTS", False) else 0
    with torch.no_grad(), EqualEpsilon(twins.name, twins.ours):
        plain = [run() for run in runs]
        for place in values:
            change = {place: lambda v: v * 0}
            with edit(twins.ours, change, rows=rows), edit(twins.theirs, change, rows=rows):
                changed = [run() for run in runs]
            assert drift(changed[1], changed[0]) <= 2 * EQUAL, place
            for old, new in zip(plain, changed, strict=True):
                assert drift(new[0], old[0]) <= leak and not torch.allclose(old[1], new[1]), place
        assert all(torch.equal(old, run()) for old, run in zip(plain, runs, strict=True))


def test_value_neurons_are_blocked_in_text_alone(twins):
    """NEMO's neurons: one list for both libraries; where image tokens share the projection, they keep their values."""
    sites = value_sites(twins.ours)
    assert [s.address for s in sites] == [s.address for s in value_sites(twins.theirs)]
    found = value_activations(twins.denoiser, twins.cond, sites, twins.x, twins.t)
    width = width_of(twins.ours, sites[0])
    assert all(a.shape == (2, width) and bool((a > 0).any()) for a in found)
    neurons = NeuronSet({sites[0].address: tuple(range(0, width, 2))}, fingerprint_of(twins.ours))
    image = sites[0].address.replace("-ctx-v", "-v")
    kept = [sites[0].address, image] if image != sites[0].address else [image]  # cross-attention has text values only
    with torch.no_grad(), EqualEpsilon(twins.name, twins.ours):
        (plain, before), _ = twins.taps()
        with block(twins.ours, neurons), block(twins.theirs, neurons):
            (ours, a), (theirs, b) = twins.taps()
    assert drift(theirs, ours) <= 2 * EQUAL and not torch.allclose(ours, plain)
    for address in kept:
        assert drift(b[address].tensor, a[address].tensor) <= EQUAL
    assert bool((a[kept[0]].tensor[..., ::2] == 0).all()) and bool((a[kept[0]].tensor[..., 1::2] != 0).any())
    assert torch.equal(a[kept[-1]].tensor, before[kept[-1]].tensor) == (len(kept) == 2)


def test_baking_is_refused_where_image_tokens_share_the_weights(twins):
    site = value_sites(twins.ours)[0]
    neurons = NeuronSet({site.address: (0,)}, fingerprint_of(twins.ours))
    for net in (twins.ours, twins.theirs):
        if not site.joint:
            assert bake(net, neurons)
        else:
            with pytest.raises(VitrineError, match="read image tokens too"):
                bake(net, neurons)
