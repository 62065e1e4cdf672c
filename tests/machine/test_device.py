"""Every call on a device without float64: nothing from the CPU among its tensors, and the result of the CPU."""

import pytest
import torch
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import difference, pairs, plain, traffic
from vitrine_tests.machine.pretend import NAME, Accelerator, MixedDevices, NoFloat64
from vitrine_tests.machine.table import FULL, equal


def cells():
    return [(name, family) for name, family in pairs() if FULL or not CALLS[name].slow]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family"), list(cells()))
def test_the_device_gives_the_result_of_the_cpu(name, family):
    steps = 2 if CALLS[name].steps == 2 else 0  # the run that the syncs are counted in
    error = difference(traffic(name, family, steps).made, plain(name, family))
    measure.note(name, family, "on the device", error)
    assert error <= equal(name), f"{error:.3g}"


def test_the_device_refuses_what_a_gpu_would():
    with Accelerator() as device:
        x = torch.ones(3, device=NAME)
        with pytest.raises(MixedDevices, match=r"\(3,\)"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).device.type == NAME, "a scalar of the CPU is let through"
        with device.counting() as seen:
            assert float(x.sum()) == 3.0 and x[torch.tensor([0, 2])].shape == (2,)
            x.to("cpu"), torch.zeros(2).to(NAME), x[x > 0]
            x.double()
        assert (seen.syncs, seen.uploads, seen.count("float64")) == (3, 2, 1), str(seen)


def test_a_device_without_float64_refuses_what_vitrine_makes():
    from vitrine.engine.activations.segmentation import iou

    with Accelerator(float64=False):
        x = torch.ones(1, 3, device=NAME)
        assert x.double().dtype == torch.float64, "others may"
        with pytest.raises(NoFloat64, match="segmentation.py"):
            iou(torch.ones(2, 2, dtype=torch.long, device=NAME))
