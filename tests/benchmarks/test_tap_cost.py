"""What tapping costs on a full-size SD1.5 UNet with random weights (3.4 GB in float32). Not part of the test run:

    VITRINE_BENCH=1 pytest tests/benchmarks/test_tap_cost.py -s

Two bounds are held. Capturing k places adds less than 3 % to a bare forward plus the copy of the tensors it hands over.
With early exit, a set of places takes at most its share of the forward's FLOPs plus 5 percentage points.
Latents are 64 x 64 (512 px); FLOP shares are counted at that size. VITRINE_BENCH_SIDE=32 is four times quicker, but
there the smallest layers wait for their weights, not for arithmetic, so time shares exceed FLOP shares.
Runs of the two sides alternate and their minima are compared, since other work may share the machine.
"""

import os
import time

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.hooks import capture

pytestmark = pytest.mark.skipif(os.environ.get("VITRINE_BENCH") != "1", reason="minutes of CPU: set VITRINE_BENCH=1")

ROUNDS = int(os.environ.get("VITRINE_BENCH_ROUNDS", "5"))
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
    return UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=SIDE).eval()


@pytest.fixture
def say(request):
    """Shows a measured figure in the test run's own output."""
    return request.config.get_terminal_writer().line


@pytest.fixture(scope="module")
def call(unet):
    """One bare forward."""
    x, text = torch.randn(1, 4, SIDE, SIDE), torch.randn(1, 77, 768)
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
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


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


@pytest.mark.parametrize("name", list(TAP_SETS))
def test_early_exit_takes_its_share_of_the_flops(unet, call, say, name):
    def stopped():
        with capture(unet, TAP_SETS[name], early_exit=True) as taps:
            taps.run(call)

    share = flops(stopped) / flops(call)
    bare, short = alternate(call, stopped)
    say(f"\n{name}: FLOP share {share:.3f}, time share {short / bare:.3f} (bare {bare:.3f} s, stopped {short:.3f} s)")
    assert short / bare <= share + 0.05
