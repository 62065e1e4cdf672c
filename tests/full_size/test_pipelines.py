"""Every pipeline of the pack on a full-size checkpoint, read by diffusers' ``from_single_file``."""

import pytest
import torch
from vitrine_tests.full_size.conftest import families
from vitrine_tests.full_size.measure import measuring
from vitrine_tests.full_size.pipeline_cases import CASES


@pytest.mark.parametrize(("name", "family"), [pair for pair in CASES if pair[1] in families()])
def test_pipeline(name, family, loaded):
    found = loaded(family)
    with measuring("diffusers", name, family):
        tensors = CASES[name, family](found)
    for value in tensors:
        assert bool(torch.isfinite(value.float()).all())
        assert value.numel() == 1 or float(value.float().std()) > 0, "one value everywhere"
