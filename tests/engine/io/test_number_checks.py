"""Finite or not, in one pass."""

import math

import pytest
import torch
from vitrine.engine.io.number_checks import all_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_enough(dtype, place, bad):
    values = torch.randn(1000).to(dtype)
    assert all_finite(values)
    values[place] = bad
    assert not all_finite(values)
    assert not all_finite(values.view(10, 10, 10).transpose(0, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opposite_infinities_and_overflowing_sums(dtype):
    values = torch.zeros(64, dtype=dtype)
    values[3], values[9] = math.inf, -math.inf
    assert not all_finite(values)
    assert all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
    assert all_finite(torch.full((1000,), torch.finfo(dtype).min, dtype=dtype))


def test_what_has_no_sum_of_its_own():
    assert all_finite(torch.empty(0))
    assert all_finite(torch.arange(5))
    eight = torch.randn(64).to(torch.float8_e4m3fn)
    assert all_finite(eight)
    assert not all_finite(torch.full((4,), math.nan).to(torch.float8_e4m3fn))
    assert not all_finite(torch.full((4,), math.inf, requires_grad=True))
