"""Every call on a GPU, where there is one: in every precision, placed every way, the result of the CPU."""

import pytest
import torch
from vitrine_tests.machine.modes import difference, pairs, placed, plain
from vitrine_tests.machine.table import FULL, bound, equal, modes_of, promised

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

SMALL = {"nemo.around.find": 0.005}
"""Call -> the largest relative error in float32: a similarity of 0.03 is what is left of larger numbers."""


@pytest.fixture(autouse=True)
def float32_is_float32(monkeypatch):
    """Products in TF32 have ten bits, and the CPU has none of them."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def cells():
    """(call, family, mode, precision): all modes in float32 and all precisions, or one of each in turn."""
    for number, (name, family) in enumerate(pairs()):
        placings = [m for m in modes_of(name, family) if m != "on the device"]
        halves = [d for d in ("fp16", "bf16") if promised(name, family, d)]
        if not FULL:
            placings, halves = placings[number % len(placings) :][:1], halves[number % 2 :][:1]
        yield from ((name, family, mode, "fp32") for mode in ("on the device", *placings))
        yield from ((name, family, "on the device", dtype) for dtype in halves)


@pytest.mark.parametrize(("name", "family", "mode", "dtype"), list(cells()))
def test_a_gpu_gives_the_result_of_the_cpu(name, family, mode, dtype):
    """In half precision, the CPU's in the same: torch 2.11 makes other noise there than in float32."""
    error = difference(placed(name, family, mode, dtype, "cuda"), plain(name, family, dtype))
    allowed = SMALL.get(name, equal(name)) if dtype == "fp32" else bound(name, dtype)
    assert error <= allowed, f"{error:.3g}, at most {allowed}"
