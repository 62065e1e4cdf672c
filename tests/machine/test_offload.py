"""Every call with models offloaded, compiled, sliced, and with an adapter: the plain result, and all where it was."""

import pytest
import torch
from vitrine.engine.placement import upcast_vae
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import MODES, OFFLOADED, difference, pairs, placed, plain
from vitrine_tests.machine.pretend import NAME, Accelerator, DeviceTensor
from vitrine_tests.machine.stock import stock
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


@pytest.mark.parametrize("name", ["w2w.invert_image", "emd.correct"])
def test_gradients_find_the_weights_of_leaves(name):
    family = next(iter(CALLS[name].kinds))
    assert difference(placed(name, family, "groups, leaves"), plain(name, family)) <= equal(name)


@pytest.mark.parametrize("mode", OFFLOADED)
@pytest.mark.parametrize("name", ["tap", "emd.one_step"])
def test_sdxls_vae_is_upcast_where_its_weights_are_away(name, mode):
    made = placed(name, "sdxl", mode, "fp16")
    assert difference(made, plain(name, "sdxl", "fp16")) < 5e-3


@pytest.mark.parametrize("mode", ["on the device", *OFFLOADED])
def test_an_upcast_vae_computes_in_float32_and_gets_its_weights_back(mode):
    with Accelerator():
        pipe = stock("sdxl").to(torch.float16)
        MODES[mode](pipe)
        weights = {k: (v.inner if isinstance(v, DeviceTensor) else v) for k, v in pipe.vae.state_dict().items()}
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(NAME)
        with upcast_vae(pipe.vae) as vae, torch.no_grad():
            assert vae.decode(latents).sample.dtype == torch.float32
        after = {k: (v.inner if isinstance(v, DeviceTensor) else v) for k, v in pipe.vae.state_dict().items()}
    assert all(v.dtype == after[k].dtype == torch.float16 for k, v in weights.items())
    assert all(v.is_meta or torch.equal(v, after[k]) for k, v in weights.items())
