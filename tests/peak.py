"""What a job really holds: the process's resident memory at its highest, beyond what it was before."""

import contextlib
import ctypes
import gc
from pathlib import Path

import pytest
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MiB = 2**20
needs_peak = pytest.mark.skipif(not RESET.exists(), reason="the system does not tell a process's peak")


def _kib(name):
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def held(run):
    """Bytes that the process held at most beyond what it had; warm up first what is loaded once and kept."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed pages would hide as many that are taken
    RESET.write_text("5")  # the peak begins anew
    before = _kib("VmRSS")
    with torch.no_grad():
        run()
    return 1024 * (_kib("VmHWM") - before)
