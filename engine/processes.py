"""The processes of ``accelerate launch`` or ``torchrun``, on GPUs or CPU cores, and worker processes of our own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

ONE_CORE = {
    "OMP_NUM_THREADS": "1",  # two threads wait for one another at each small operation, two workers hardly ever
    # glibc returns large blocks to the system at once, and a training step asks for the same ones again: thousands of
    # page faults. Kept, in huge pages where the system has them, they stay mapped.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.hugetlb=1",
}
"""Environment of a worker that trains on one core; it must be set before the process starts."""


def processes() -> Any:
    """accelerate's ``PartialState``: this process's index, the number of processes, and its device.

    Without ``cpu=True`` accelerate forms no group of CPU processes.
    """
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available())


def cores() -> int:
    """CPU cores this process may use; 1 if an accelerator does the work or ``torchrun`` has already divided it."""
    if torch.accelerator.is_available() or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return 1
    return max(1, torch.get_num_threads())


def side_by_side(job: Callable[[int, int], T], count: int) -> list[T]:
    """[job(0, count), ..., job(count - 1, count)], each run in a new process with one thread.

    If one raises, the others are terminated and the error is raised here. ``job`` is pickled for the processes, so it
    must be a plain function or a method of a plain object.
    """
    from concurrent.futures import ProcessPoolExecutor  # imports much else, which would slow ComfyUI's start

    others = set(multiprocessing.active_children())
    with _environment(ONE_CORE), ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        try:
            return [future.result() for future in [pool.submit(job, i, count) for i in range(count)]]
        except BaseException:  # also on an interrupt: do not wait for the others
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
