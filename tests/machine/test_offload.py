"""Every call with models offloaded, compiled, sliced, and with an adapter: the plain result, and all where it was."""

import pytest
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import difference, pairs, placed, plain
from vitrine_tests.machine.table import FULL, PENDING, equal, modes_of


def cells():
    """All cells, or of each call and family one mode in turn, model offload among every call's."""
    for number, (name, family) in enumerate(pairs()):
        modes = [m for m in modes_of(name) if m != "on the device"]
        if not FULL:
            first = family == next(iter(CALLS[name].kinds))
            turn = modes[number % len(modes)]
            modes = (
                []
                if CALLS[name].slow or CALLS[name].trains
                else [m for m in modes if m == turn or (first and m == "model offload")]
            )
        for mode in modes:
            pending = PENDING.get((name, mode))
            marks = [pytest.mark.xfail(reason=pending, strict=True)] if pending else []
            yield pytest.param(name, family, mode, marks=marks)


@pytest.mark.parametrize(("name", "family", "mode"), list(cells()))
def test_offloading_changes_nothing(name, family, mode):
    error = difference(placed(name, family, mode), plain(name, family))
    measure.note(name, family, mode, error)
    assert error <= equal(name), f"{error:.3g}"


def test_half_precision_is_offloaded_too():
    for mode in ("model offload", "sequential offload"):
        found = placed("tap", "sdxl", mode, "fp16")
        assert difference(found, plain("tap", "sdxl", "fp16")) < 5e-3, "the VAE is upcast where its weights are away"
