"""What the benchmarks share: both sides timed in turn, one row for each pair, kept in pytest-benchmark's JSON.

    VITRINE_BENCH=1 pytest tests/benchmarks --benchmark-json=results.json
    python tests/benchmarks/table.py results.json > docs/speed.md

VITRINE_BENCH_ROUNDS and _SIDE (of latents) replace each test's own, _DEVICE and _DTYPE say where full-size networks run
and _MODELS="portraits,SD1.5,SDXL" which; _TINY=1 makes them narrow: the code runs, and no bound is held.
Full-size networks have random weights. On a busy machine, --benchmark-timer=time.process_time counts CPU time, which
other programs hardly lengthen; with OMP_NUM_THREADS=1 it is the latency.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vitrine_tests import models

HERE = Path(__file__).parent
ENV = {
    k: os.environ.get(f"VITRINE_BENCH_{k}", v)
    for k, v in {
        "ROUNDS": "",
        "SIDE": "",
        "DEVICE": "cpu",
        "DTYPE": "float32",
        "MODELS": "portraits,SD1.5,SDXL",
        "TINY": "",
    }.items()
}
NETWORKS: dict[str, dict[str, Any]] = {"SD1.5": models.SD15, "SDXL": models.SDXL}
NARROW: dict[str, dict[str, Any]] = {
    "SD1.5": {"block_out_channels": (32, 32, 64, 64), "attention_head_dim": 4},
    "SDXL": {"block_out_channels": (32, 64, 64), "attention_head_dim": 4},
}
Run = Callable[[], Any]


def pytest_collection_modifyitems(items):
    """Nothing runs unasked; the larger network comes last, so that only one is in memory."""
    mine = [i for i in items if HERE in i.path.parents]
    if not os.environ.get("VITRINE_BENCH"):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="minutes of CPU: set VITRINE_BENCH=1"))
    mine.sort(key=lambda item: "SDXL" in item.name or "sdxl" in item.name)
    items[:] = [i for i in items if HERE not in i.path.parents] + mine


class Bench:
    """One test's measurements."""

    networks: dict[str, Any] = {}  # of the whole session

    def __init__(self, benchmark, config):
        self.benchmark, self.tiny, self.device = benchmark, bool(ENV["TINY"]), ENV["DEVICE"]
        self.dtype, self._line = getattr(torch, ENV["DTYPE"]), config.get_terminal_writer().line

    def say(self, text):
        """One line in the test run's own output."""
        self._line(f"\n{text}")

    # --- models ---------------------------------------------------------------------------------------------------
    def full(self, name, batch=1, side=64, device=None):
        """A full-size UNet with its inputs; called, it is one bare forward."""
        self._wanted(name)
        side = int(ENV["SIDE"] or (8 if self.tiny else side))
        net = self._network(name) if device is None else build(name, device, self.tiny)
        with torch.device(device or self.device):
            x, text = torch.randn(batch, 4, side, side), torch.randn(batch, 77, net.config.cross_attention_dim)
            t, added = torch.tensor(51), None
            if name == "SDXL":
                added = {"text_embeds": torch.randn(batch, 1280), "time_ids": torch.full((batch, 6), 512.0)}
        if device is None:
            x, text = x.to(self.dtype), text.to(self.dtype)
            added = added and {k: v.to(self.dtype) for k, v in added.items()}
        rows = f", batch {batch}" if batch > 1 else ""
        label = f"{'tiny ' if self.tiny else ''}{name} size, {side} x {side}{rows}"
        return Full(net=net, x=x, text=text, t=t, added=added, label=label, side=side)

    def model(self, name, batch=1, side=64):
        """``portraits`` or a full-size name: the network with its inputs."""
        if name != "portraits":
            return self.full(name, batch, side)
        net, rows = self.portraits().unet, f", batch {batch}" if batch > 1 else ""
        x, text = torch.randn(batch, 4, 16, 16), torch.zeros(batch, 24, 64)
        return Full(net=net, x=x, text=text, t=torch.tensor(51), added=None, label=f"portraits{rows}", side=16)

    def _network(self, name):
        if name not in self.networks:
            self.networks.clear()
            self.networks[name] = build(name, self.device, self.tiny).to(self.dtype)
        return self.networks[name]

    def portraits(self):
        """The shipped model, frozen; always measured on the CPU."""
        from vitrine.engine.portraits import load_portraits

        self._wanted("portraits")
        if self.device != "cpu":
            pytest.skip("the portraits model is measured on the CPU")
        found = load_portraits()
        for part in (found.unet, found.vae, found.text_encoder):
            part.requires_grad_(False)
        return found

    def _wanted(self, name):
        if name not in ENV["MODELS"].split(","):
            pytest.skip(f"{name} is not in VITRINE_BENCH_MODELS")

    # --- times ----------------------------------------------------------------------------------------------------
    def rounds(self, usual):
        """How many rounds to count."""
        return int(ENV["ROUNDS"] or (1 if self.tiny else usual))

    def now(self):
        """Seconds, after the device has finished."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return self.benchmark._timer()  # both sides by the clock that pytest-benchmark is set to use

    def seconds(self, run):
        """Seconds of one run."""
        start = self.now()
        run()
        return self.now() - start

    def compare(
        self,
        method: str,
        model: str,
        ours: Run,
        against: dict[str, Run | tuple[Run, float]],
        rounds: int = 3,
        warm: int = 1,
        grad: bool = False,
        summary: Callable[[list[float]], float] = min,
    ):
        """name -> row. In each round every run of ``against`` and then ours, so that a busy machine disturbs all alike.

        Args:
            against: name -> run, or (run, what its seconds are multiplied by).
            warm: rounds before the first that counts.
            summary: of a side's rounds: the smallest is what it can do, the mean is throughput.
        """
        runs = {k: v if isinstance(v, tuple) else (v, 1.0) for k, v in against.items()}
        seconds: dict[str, list[float]] = {k: [] for k in runs}
        peaks = {k: 0.0 for k in (*runs, "")}

        def others():
            for name, (run, factor) in runs.items():
                restart_peak(self.device)
                seconds[name].append(factor * self.seconds(run))
                peaks[name] = max(peaks[name], peak(self.device))
            restart_peak(self.device)

        def seen():
            peaks[""] = max(peaks[""], peak(self.device))

        def mine():
            ours()
            self.now()

        with torch.set_grad_enabled(grad):
            self.benchmark.pedantic(
                mine, setup=others, teardown=seen, rounds=self.rounds(rounds), warmup_rounds=0 if self.tiny else warm
            )
        own = list(self.benchmark.stats.stats.data)
        return {
            name: self.record(
                method, name, model, own, seconds[name][-len(own) :], (peaks[""], peaks[name]), summary=summary
            )
            for name in runs
        }

    def record(self, method, against, model, ours, theirs, peaks=(0.0, 0.0), unit="time", summary=min):
        """Keep one row: smallest of ours over smallest of theirs, and least, median and largest ratio of a round."""
        each = [a / b for a, b in zip(ours, theirs, strict=True)]
        mine, other = summary(ours), summary(theirs)
        row = {
            "method": method, "against": against, "model": model, "unit": unit, "ratio": mine / other,
            "low": min(each), "median": statistics.median(each), "high": max(each), "rounds": len(each),
            "ours": mine, "theirs": other,
            "peak_mib": round(peaks[0]), "against_mib": round(peaks[1]), "device": device_name(self.device),
            "threads": torch.get_num_threads(), "dtype": ENV["DTYPE"], "torch": torch.__version__,
        }  # fmt: skip
        self.benchmark.extra_info.setdefault("rows", []).append(row)
        self.say(
            f"{method} / {against}, {model}: {row['ratio']:.4g} of the {unit} ({row['low']:.4g} to "
            f"{row['high']:.4g}; {row['ours']:.4g} against {row['theirs']:.4g})"
        )
        return SimpleNamespace(**row)

    def at_most(self, what, found, bound):
        """Hold a bound on the CPU; narrow networks and GPUs, where hooks show more, are not held to it."""
        assert self.tiny or self.device != "cpu" or found <= bound, (
            f"{what}: {found:.4g}, at most {bound:.4g} was promised"
        )


class Full(SimpleNamespace):
    """A network with inputs."""

    def __call__(self):
        return self.net(self.x, self.t, encoder_hidden_states=self.text, added_cond_kwargs=self.added).sample


def build(name, device, tiny=False):
    """A UNet of a published shape with random weights."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    config = NETWORKS[name] | (NARROW[name] if tiny else {})
    if tiny and name == "SDXL":
        config = config | {"transformer_layers_per_block": (1, 1, 2)}
    with torch.device(device):
        return UNet2DConditionModel(**config).eval().requires_grad_(False)


def device_name(device):
    """``cpu``, or the accelerator's own name."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def restart_peak(device):
    """Count peak memory from here on."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no such file outside Linux: no figure then
        return


def peak(device):
    """MiB at the peak: of the accelerator's tensors, or of the whole process. 0 where the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM")), 0.0)


@pytest.fixture
def bench(benchmark, request):
    """Times, rows and models of one benchmark."""
    return Bench(benchmark, request.config)
