"""One forward of every new family's network, by the bare call that all methods share, in half precision."""

import copy

import pytest
import torch
from vitrine.engine.families import call_of, family_of
from vitrine_tests.families.twin import NAMES, inputs, network
from vitrine_tests.machine import measure
from vitrine_tests.machine.table import DTYPES_OF_FORWARDS


@pytest.mark.parametrize("dtype", DTYPES_OF_FORWARDS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_half_precision_is_near_float32(name, dtype):
    kind, most = DTYPES_OF_FORWARDS[dtype]
    net, (x, t, cond) = network(name), inputs(name)
    wanted = call_of(net)(x, torch.full((len(x),), t), cond)
    found = call_of(copy.deepcopy(net).to(kind))(x, torch.full((len(x),), t), cond)
    assert found.dtype == kind and torch.isfinite(found).all()
    error = float((found.float() - wanted).norm() / wanted.norm())
    measure.note("forward", family_of(net).name if name != "klein" else "Klein", dtype, error)
    assert error <= most, f"{error:.3g}"
