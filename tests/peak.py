"""What a job really holds: the process's resident memory at its highest, beyond what it was before."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MiB = 2**20
ALONE = "VITRINE_ALONE"
"""Set by ``test_peaks.py``, which starts a process for each job: what others left in the allocator would count too."""


def needs_peak(test):
    """Marks a test that bounds the memory of its process: nightly, and in a process of its own."""
    alone = bool(RESET.exists() and os.environ.get(ALONE))
    return pytest.mark.nightly(pytest.mark.skipif(not alone, reason="in a process of its own by test_peaks.py")(test))


def bounded(what, peak, budget):
    """Holds a peak to 1.25 times its budget, and says it where pytest shows what is printed."""
    print(f"\n{what}: {peak / MiB:.1f} MiB of {budget / MiB:g}")  # noqa: T201
    assert peak <= 1.25 * budget, f"{what}: {peak / MiB:.1f} MiB of {budget / MiB:g}"


def _kib(name):
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def _placing(threshold):
    """From how many bytes on glibc gives blocks pages of their own. It raises this by itself when large ones are freed;
    then peaks would depend on what ran before."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, threshold)
        libc.malloc_trim(0)  # freed pages would hide as many that are taken


def held(run):
    """Bytes that the process held at most beyond what it had; warm up first what is loaded once and kept."""
    gc.collect()
    _placing(128 * 1024)  # as in a process that has just begun
    RESET.write_text("5")  # the peak begins anew
    before = _kib("VmRSS")
    try:
        with torch.no_grad():
            run()
        return 1024 * (_kib("VmHWM") - before)
    finally:
        _placing(32 * MiB)  # as in one that has run for a while
