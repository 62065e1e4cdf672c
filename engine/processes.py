"""The processes of ``accelerate launch`` or ``torchrun``, on GPUs or on CPU cores; and workers of our own on cores."""

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
    # glibc gives large blocks back at once, and a training step asks for the same again: thousands of page faults.
    # Kept, in huge pages where the system has them, they stay mapped.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.hugetlb=1",
}
"""Environment of a worker that trains on one core; must be there when its process starts."""


def processes() -> Any:
    """accelerate's ``PartialState``: this process's number of how many, and its device.

    accelerate forms no group of CPU processes unless it is told that there is no accelerator.
    """
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available())


def cores() -> int:
    """CPU cores this process may use; 1 where an accelerator does the work, or ``torchrun`` has shared it out."""
    if torch.accelerator.is_available() or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return 1
    return max(1, torch.get_num_threads())


def side_by_side(job: Callable[[int, int], T], count: int) -> list[T]:
    """[job(0, count), ..., job(count - 1, count)], each in a new process of one thread; what one raises is raised here
    and ends the others.

    ``job`` is sent to the processes, so it must be a plain function or a method of a plain object.
    """
    from concurrent.futures import ProcessPoolExecutor  # it is loaded at once with much else; ComfyUI's start waits

    others = set(multiprocessing.active_children())
    with _environment(ONE_CORE), ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        try:
            return [found.result() for found in [pool.submit(job, i, count) for i in range(count)]]
        except BaseException:  # an interrupt, too: nobody waits for the rest
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
