"""Every call in half precision, on every family it serves: finite, and near float32."""

import pytest
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import difference, pairs, plain
from vitrine_tests.machine.table import FULL, bound, promised


def cells():
    for number, (name, family) in enumerate(pairs()):
        if CALLS[name].slow and not FULL:
            continue
        for dtype in ("fp16", "bf16") if FULL else (("fp16", "bf16")[number % 2],):
            if not promised(name, family, dtype):
                continue
            yield name, family, dtype


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family", "dtype"), list(cells()))
def test_half_precision_is_near_float32(name, family, dtype):
    error = difference(plain(name, family, dtype), plain(name, family))
    measure.note(name, family, dtype, error)
    assert error <= bound(name, dtype), f"{error:.3g}"
