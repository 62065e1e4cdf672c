"""Every call with models offloaded, compiled, sliced, and with an adapter: the plain result, and all where it was."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.runtime.placement import copied, upcast_vae
from vitrine_tests.lanes import nightly_but
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import MODES, OFFLOADED, difference, pairs, placed, plain, where
from vitrine_tests.machine.pretend import NAME, Accelerator, DeviceTensor
from vitrine_tests.machine.stock import backbone, stock
from vitrine_tests.machine.table import FULL, LEFT_OUT, bound, equal, modes_of, promised


def cells():
    """All cells, or of each call and family one mode in turn, model offload among every call's."""
    for number, (name, family) in enumerate(pairs()):
        modes = [m for m in modes_of(name, family) if m != "on the device"]
        if not FULL:
            first = family == next(iter(CALLS[name].kinds))
            turn = modes[number % len(modes)]
            modes = (
                []
                if CALLS[name].slow or CALLS[name].trains
                else [m for m in modes if m == turn or (first and m == "model offload")]
            )
        yield from ((name, family, mode) for mode in modes)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family", "mode"), list(cells()))
def test_offloading_changes_nothing(name, family, mode):
    error = difference(placed(name, family, mode), plain(name, family))
    measure.note(name, family, mode, error)
    assert error <= equal(name), f"{error:.3g}"


@pytest.mark.nightly
@pytest.mark.parametrize("wrapped", [False, True])
def test_positions_reach_code_that_was_compiled_before(wrapped):
    """What a first call had compiled went on with the old positions, without a word."""
    made = []
    for compiled in (False, True):
        torch._dynamo.reset()
        pipe, how = stock("flux"), {"num_inference_steps": 2, "output_type": "latent"}
        if compiled and wrapped:
            pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        elif compiled:
            pipe.transformer.compile(backend="eager")
        if compiled:
            pipe("a cat", height=64, width=96, **how)
        moved = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((96, 64), (64, 64)))
        made.append([moved("a cat", seeds=[0], **how).images])
    assert difference(*made) < 1e-5


HALVED = [
    (name, family, mode)
    for name, family in pairs()
    for mode in ("model offload", "sequential offload")
    if promised(name, family, mode) and promised(name, family, "fp16")
]


@pytest.mark.parametrize(
    ("name", "family"),
    nightly_but(
        [
            ("tap", "sd"),
            ("nemo.call", "sd"),
            ("w2w.call", "sd"),
            ("w2w.invert_image", "sd"),
            ("emd.one_step", "sd"),
            ("control.checkpoint", "sd"),
            ("control", "sdxl"),
            ("resolution", "pixart"),
            ("resolution", "flux"),
        ],
        [("nemo.call", "sd"), ("resolution", "flux")],
    ),
)
def test_a_network_may_be_put_inside_torch_compile(name, family, monkeypatch):
    """``pipe.unet = torch.compile(pipe.unet)``: what stands in its place has neither a length nor a truth value."""

    def wrap(pipe, device):
        pipe.to(device)
        attribute = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
        setattr(pipe, attribute, torch.compile(backbone(pipe), backend="eager"))

    monkeypatch.setitem(MODES, "wrapped", wrap)
    assert difference(placed(name, family, "wrapped"), plain(name, family)) <= equal(name)


@pytest.mark.nightly
@pytest.mark.skipif(not FULL, reason="VITRINE_MACHINE=full: a run of the night")
@pytest.mark.parametrize(("name", "family", "mode"), HALVED)
def test_offloading_changes_nothing_in_half_precision(name, family, mode):
    error = difference(placed(name, family, mode, "fp16"), plain(name, family, "fp16"))
    assert error <= bound(name, "fp16"), f"{error:.3g}"


@pytest.mark.parametrize(("name", "mode"), [pair for pair in LEFT_OUT if FULL or pair[1] == "model offload"])
def test_trainings_refuse_a_network_that_is_offloaded(name, mode):
    """They ended in errors of torch, or left the network on the device."""
    with pytest.raises(VitrineError, match=r"its weights offloaded; accepted: a network whose .*\.to\(device\)"):
        placed(name, "sd", mode)


@pytest.mark.parametrize("mode", OFFLOADED)
def test_a_copy_is_whole_and_without_hooks(mode):
    """A deep copy of an offloaded network kept hooks that were bound to the original, and weights on no device."""
    wanted = {k: v.clone() for k, v in stock("sdxl").unet.state_dict().items()}
    with Accelerator():
        pipe = stock("sdxl")
        MODES[mode](pipe, NAME)
        before = where(pipe)
        made = copied(pipe.unet, torch.float64)
        assert where(pipe) == before and {p.device.type for p in made.parameters()} == {NAME}
        assert not any("_hf_hook" in vars(m) or "_diffusers_hook" in vars(m) for m in made.modules())
        assert made.state_dict().keys() == wanted.keys()
        assert all(torch.equal(v.cpu(), wanted[k].double()) for k, v in made.state_dict().items())


@pytest.mark.nightly
def test_gradients_find_the_weights_of_leaves():
    name = "w2w.invert_image"
    family = next(iter(CALLS[name].kinds))
    assert difference(placed(name, family, "groups, leaves"), plain(name, family)) <= equal(name)


@pytest.mark.parametrize(
    ("name", "mode"),
    nightly_but(
        [(name, mode) for name in ("tap", "emd.one_step") for mode in OFFLOADED],
        [("tap", "sequential offload"), ("emd.one_step", "model offload")],
    ),
)
def test_sdxls_vae_is_upcast_where_its_weights_are_away(name, mode):
    made = placed(name, "sdxl", mode, "fp16")
    assert difference(made, plain(name, "sdxl", "fp16")) < 5e-3


@pytest.mark.parametrize("mode", ["on the device", *OFFLOADED])
def test_an_upcast_vae_computes_in_float32_and_gets_its_weights_back(mode):
    with Accelerator():
        pipe = stock("sdxl").to(torch.float16)
        MODES[mode](pipe, NAME)
        weights = {k: (v.inner if isinstance(v, DeviceTensor) else v) for k, v in pipe.vae.state_dict().items()}
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(NAME)
        with upcast_vae(pipe.vae) as vae, torch.no_grad():
            assert vae.decode(latents).sample.dtype == torch.float32
        after = {k: (v.inner if isinstance(v, DeviceTensor) else v) for k, v in pipe.vae.state_dict().items()}
    assert all(v.dtype == after[k].dtype == torch.float16 for k, v in weights.items())
    assert all(v.is_meta or torch.equal(v, after[k]) for k, v in weights.items())
