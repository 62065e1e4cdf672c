"""What tapping costs beside a bare forward, and beside a whole forward with plain hooks.

Bounds are held on a full-size SD1.5 UNet with random weights (3.4 GB in float32). Capturing k places takes less than
3 % of a forward beyond the copy of the tensors handed over: in its hooks, before and after. A stopped forward counts
the FLOPs that an untouched one counts until the last place, no more. It ends soon after it has reached that place,
within 3 % of its time (8 to 10 ms of 4.7 s on the one CPU tried). Its share of a bare forward's time is at most 5
percentage points above the share that an untouched forward needs to get there. That share is the machine's: a CPU may
spend more time on a FLOP in the low levels than in the high ones. What is compared is read in one run, or is the
median of the rounds: even the fastest of sixteen differs by 3 % between runs.
VITRINE_BENCH_BATCH (default 1) sets the rows.
"""

import functools
import os
import statistics
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.tracing.addresses import resolve
from vitrine.engine.tracing.hooks import capture

BATCH = int(os.environ.get("VITRINE_BENCH_BATCH", "1"))
OURS_V15 = (
    "up-level1-repeat1-vit-block0-cross-q, up-level1-repeat2-res-out,"
    "up-level2-repeat1-vit-block0-cross-q, up-level3-repeat0-vit-block0-self-k"
)
EVERY = "*-out *-res-increment"
SETS = {
    "portraits": {"mid": "mid-vit-out", "early query": "up-level0-repeat0-vit-block0-cross-q", "every block": EVERY},
    "SD1.5": {
        "mid": "mid-vit-out",
        "DIFT level 1": "up-level1-upsampler-out",
        "Ours-v1.5": OURS_V15,
        "every block": EVERY,
    },
}
ROWS = {"portraits": 16, "SD1.5": BATCH}


def flops(run):
    """FLOPs of a run; with the plain attention kernel, as the counter does not know the CPU's fused one."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def flops_until(full, path):
    """FLOPs of an untouched forward until a module of it has ended."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        return until(full, full.net.get_submodule(path), counter.get_total_flops)


def until(run, module, read):
    """What ``read`` says once the module has ended for the first time in a run."""
    reached = []
    handle = module.register_forward_hook(lambda *_: reached.append(read()))
    try:
        run()
    finally:
        handle.remove()
    return reached[0]


def stopped(full, addresses):
    """A forward that ends at the last place."""
    with capture(full.net, addresses, early_exit=True):
        full()


def naive(full, addresses):
    """A whole forward with plain hooks that keep copies."""
    kept, handles = [], []
    for site in resolve(full.net, addresses):
        module = full.net.get_submodule(site.path)
        handles.append(
            module.register_forward_hook(
                lambda m, a, out: kept.append((out[0] if isinstance(out, tuple) else out).clone())
            )
        )
    try:
        full()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def timed_hooks(now):
    """Hooks that are registered here note for how long each call takes; gives the list of seconds."""
    seconds = []

    def timed(hook):
        @functools.wraps(hook)
        def call(*args, **kwargs):
            start = now()
            try:
                return hook(*args, **kwargs)
            finally:
                seconds.append(now() - start)

        return call

    def timing(register):
        return lambda module, hook, **kwargs: register(module, timed(hook), **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("register_forward_hook", "register_forward_pre_hook"):
            patched.setattr(nn.Module, name, timing(getattr(nn.Module, name)))
        yield seconds


@pytest.mark.parametrize(
    ("model", "places"), [("portraits", "every block"), ("SD1.5", "Ours-v1.5"), ("SD1.5", "every block")]
)
def test_capture_adds_less_than_three_percent(bench, model, places):
    full, kept, rounds = bench.model(model, ROWS[model]), {}, []

    def tapped():
        start = bench.now()
        with timed_hooks(bench.now) as in_hooks, capture(full.net, SETS[model][places]) as taps:
            opened = bench.now()
            full()
            ended = bench.now()
        end = bench.now()
        assert len(in_hooks) >= len(taps.activations), "every place has a hook that was timed"
        rounds.append((opened - start + sum(in_hooks) + end - ended, end - start))
        kept.update(taps.activations)

    bench.compare(f"tap, {places}", full.label, tapped, {"bare forward": full}, 16)
    sources = [activation.tensor for activation in kept.values()]
    copies = min(bench.seconds(lambda: [tensor.clone() for tensor in sources]) for _ in range(3))
    extra = statistics.median((ours - copies) / (whole - ours) for ours, whole in rounds)
    bench.say(f"{len(sources)} places, {sum(t.nbytes for t in sources) / 2**20:.1f} MiB, beyond the copy {extra:+.2%}")
    if model == "SD1.5":
        bench.at_most("time beyond the copy", extra, 0.03)


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("portraits", "mid"),
        ("portraits", "early query"),
        ("SD1.5", "mid"),
        ("SD1.5", "DIFT level 1"),
        ("SD1.5", "Ours-v1.5"),
    ],
)
def test_early_exit_takes_its_share_of_the_flops(bench, model, places):
    full, addresses = bench.model(model, ROWS[model]), SETS[model][places]
    path = resolve(full.net, addresses)[-1].path
    shares = {"ours": [], "bare": []}

    def run_until(name, run):
        """A run, whose share of time until the last place is kept."""
        start = bench.now()
        reached = until(run, full.net.get_submodule(path), bench.now)
        shares[name].append((reached - start) / (bench.now() - start))

    ours = functools.partial(run_until, "ours", lambda: stopped(full, addresses))
    bare = functools.partial(run_until, "bare", full)
    against = {"bare forward": bare, "whole forward with plain hooks": lambda: naive(full, addresses)}
    rows = bench.compare(f"tap with early exit, {places}", full.label, ours, against, 12)
    if model == "portraits":
        return
    twin = bench.full(model, BATCH, device="meta")
    counted, whole = flops(lambda: stopped(twin, addresses)), flops(twin)
    assert counted == flops_until(twin, path) < whole, "the stopped forward computes nothing beyond the place"
    after, way = 1 - min(shares["ours"]), statistics.median(shares["bare"])
    bench.say(
        f"share of FLOPs {counted / whole:.3f}, of an untouched forward's time {way:.3f}; then {after:.2%} to end"
    )
    bench.at_most("time after the place", after, 0.03)
    bench.at_most("time share", rows["bare forward"].median, way + 0.05)
