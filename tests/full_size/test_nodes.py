"""Every node of the pack on a full-size checkpoint, loaded by core's Load Checkpoint."""

import pytest
import torch
from vitrine_tests.full_size.conftest import families
from vitrine_tests.full_size.measure import measuring
from vitrine_tests.full_size.node_cases import CASES


@pytest.mark.parametrize("node_id", CASES)
@pytest.mark.parametrize("family", families())
def test_node(family, node_id, scene):
    found = scene(family)
    with measuring("ComfyUI", node_id, family):
        tensors = CASES[node_id](found)
    for value in tensors:
        assert bool(torch.isfinite(value.float()).all())
        assert value.numel() == 1 or float(value.float().std()) > 0, "one value everywhere"
