"""What tapping costs on a full-size SD1.5 UNet with random weights (3.4 GB in float32). Not part of the test run:

    VITRINE_BENCH=1 pytest tests/benchmarks/test_tap_cost.py -s

Three bounds are held. Capturing k places adds less than 3 % to a bare forward plus the copy of the tensors handed over.
A stopped forward takes at most 3 % more than the untouched one needs to get to that place. With early exit, a set of
places takes at most its share of the forward's FLOPs plus 5 percentage points. The last bound depends on the machine as
well: a CPU may spend more time on a FLOP in the low levels than in the high ones, with or without hooks.
Latents are 64 x 64 (512 px), batch 1; VITRINE_BENCH_SIDE, _BATCH and _ROUNDS change that.
Runs of the two sides alternate and their minima are compared, since other work may share the machine.
"""

import os
import time

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.addresses import resolve
from vitrine.engine.hooks import capture

pytestmark = pytest.mark.skipif(os.environ.get("VITRINE_BENCH") != "1", reason="minutes of CPU: set VITRINE_BENCH=1")

ROUNDS = int(os.environ.get("VITRINE_BENCH_ROUNDS", "5"))
BATCH = int(os.environ.get("VITRINE_BENCH_BATCH", "1"))
SIDE = int(os.environ.get("VITRINE_BENCH_SIDE", "64"))
OURS_V15 = (
    "up-level1-repeat1-vit-block0-cross-q, up-level1-repeat2-res-out,"
    "up-level2-repeat1-vit-block0-cross-q, up-level3-repeat0-vit-block0-self-k"
)
TAP_SETS = {"mid": "mid-vit-out", "DIFT level 1": "up-level1-upsampler-out", "Ours-v1.5": OURS_V15}


@pytest.fixture(scope="module")
def unet():
    """SD1.5's real shape with random weights."""
    torch.manual_seed(0)
    return build()


def build():
    return UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=SIDE).eval()


@pytest.fixture
def say(request):
    """Shows a measured figure in the test run's own output."""
    return request.config.get_terminal_writer().line


@pytest.fixture(scope="module")
def call(unet):
    """One bare forward."""
    x, text = torch.randn(BATCH, 4, SIDE, SIDE), torch.randn(BATCH, 77, 768)
    return lambda: unet(x, 51, encoder_hidden_states=text).sample


def seconds(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def alternate(*runs):
    """Shortest time of each run over interleaved rounds, after one warm-up each."""
    with torch.no_grad():
        for run in runs:
            run()
        times = [[seconds(run) for run in runs] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*times, strict=True)]


def flops(run):
    """FLOPs of a run; with the plain attention kernel, as the counter does not know the CPU's fused one."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def flop_share(addresses):
    """Share of a forward's FLOPs up to the last place, counted on a twin without weights."""
    with torch.device("meta"):
        unet = build()
        x, text, t = torch.randn(BATCH, 4, SIDE, SIDE), torch.randn(BATCH, 77, 768), torch.tensor(51)

    def stopped():
        with capture(unet, addresses, early_exit=True) as taps:
            taps.run(unet, x, t, encoder_hidden_states=text)

    return flops(stopped) / flops(lambda: unet(x, t, encoder_hidden_states=text))


@pytest.mark.parametrize("addresses", [OURS_V15, "*-out *-res-increment"], ids=["4 places", "every block"])
def test_capture_adds_less_than_three_percent(unet, call, say, addresses):
    kept = {}

    def tapped():
        with capture(unet, addresses) as taps:
            call()
        kept.update(taps.activations)

    bare, with_taps = alternate(call, tapped)
    sources = [found.tensor for found in kept.values()]
    (copies,) = alternate(lambda: [tensor.clone() for tensor in sources])
    extra = (with_taps - copies) / bare - 1
    sizes = f"{len(sources)} places, {sum(t.nbytes for t in sources) / 2**20:.1f} MiB"
    say(f"\n{sizes}: bare {bare:.3f} s, tapped {with_taps:.3f} s, copies {copies:.3f} s, extra {extra:+.2%}")
    assert extra < 0.03


# On the one CPU tried: batch 1 needs 0.61 of the time for 0.546 of the FLOPs, which is what the untouched forward needs
# to get there; batch 4 needs 0.53. Small batches wait for the low levels' weights.
SLOW_LEVELS = pytest.mark.xfail(reason="at batch 1 the low levels run fewer FLOPs a second on a CPU", strict=False)


@pytest.mark.parametrize("name", ["mid", pytest.param("DIFT level 1", marks=SLOW_LEVELS), "Ours-v1.5"])
def test_early_exit_takes_its_share_of_the_flops(unet, call, say, name):
    def stopped():
        with capture(unet, TAP_SETS[name], early_exit=True) as taps:
            taps.run(call)

    last, arrivals = resolve(unet, TAP_SETS[name])[-1].path, []

    def bare():
        handle = unet.get_submodule(last).register_forward_hook(lambda *a: arrivals.append(time.perf_counter() - start))
        start = time.perf_counter()
        call()
        handle.remove()

    share = flop_share(TAP_SETS[name])
    whole, short = alternate(bare, stopped)
    reach = min(arrivals)
    times = f"bare {whole:.3f} s, there after {reach:.3f} s, stopped {short:.3f} s"
    say(f"\n{name}: FLOP share {share:.3f}, time share {short / whole:.3f} ({times})")
    assert short <= 1.03 * reach
    assert short / whole <= share + 0.05
