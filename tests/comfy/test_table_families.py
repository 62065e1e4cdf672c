"""Stored position tables at another size: SD3 in both libraries (PixArt's whole runs stand with the portraits)."""

import pytest
import torch
from vitrine.engine.resolution import ResolutionTransferConfig, apply
from vitrine_tests.comfy.test_rotary_families import LIMIT, Family, Parts, drift


@pytest.fixture(scope="module")
def sd3(comfy):
    with torch.no_grad():
        return Family("sd35")


@pytest.mark.parametrize("mode", ["grid", "extrapolate"])
def test_both_libraries_agree_on_sd3(comfy, sd3, mode):
    size = (sd3.columns, sd3.rows)
    before, theirs = sd3.ours(), sd3.theirs(sd3.model)
    with apply(Parts(sd3.net), ResolutionTransferConfig(size, sd3.train, "none", pos_embed=mode)):
        ours = sd3.ours()
    model, _, _ = sd3.transferred(comfy, mode)
    assert drift(sd3.theirs(model), ours) <= LIMIT
    if mode == "extrapolate":
        assert drift(ours, before) <= LIMIT, "SD3 crops the middle of its table: it extrapolates by itself"
    else:
        assert drift(ours, before) > 5 * LIMIT
    assert torch.equal(sd3.ours(), before) and torch.equal(sd3.theirs(sd3.model), theirs)


def test_sd3_at_its_trained_size_is_untouched(comfy, sd3):
    size = (sd3.columns, sd3.rows)
    before, theirs = sd3.ours(), sd3.theirs(sd3.model)
    with apply(Parts(sd3.net), ResolutionTransferConfig(size, size)):
        assert torch.equal(sd3.ours(), before)
    model, _, report = sd3.transferred(comfy, "auto", train=size, schedule="resample")
    assert not model.object_patches and "nothing is changed" in report and torch.equal(sd3.theirs(model), theirs)
