"""The processes of ``accelerate launch`` or ``torchrun``, on GPUs or CPU cores, and worker processes that we start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch  # where it is used, it is imported: a worker starts without it

T = TypeVar("T")

ONE_CORE = {
    "OMP_NUM_THREADS": "1",  # two threads wait for one another at each small operation, two workers hardly ever
    # glibc returns large blocks to the system at once, and every training step allocates them again, at the cost of
    # thousands of page faults. With these settings they stay mapped, in huge pages if the system has them.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.hugetlb=1",
}
"""Environment of a worker that trains on one core; it must be set before the process starts."""


_PATIENCE = timedelta(days=7)
"""How long processes wait for each other; parts of a large job may differ by more than torch's half hour."""


@dataclass(frozen=True)
class Workers:
    """The processes that share a job.

    Attributes:
        index, count: index of this process, and their number.
        total: sums a tensor over all processes, with the same bits in each.
        gather: collects an object from each process, in order.
        meet: barrier.
    """

    index: int = 0
    count: int = 1
    total: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
    gather: Callable[[Any], list[Any]] = lambda own: [own]
    meet: Callable[[], None] = lambda: None

    def part(self, count: int) -> range:
        """This process's part of ``range(count)``: every n-th number for n processes."""
        return range(self.index, count, self.count)

    def own_file(self, path: str | Path) -> Path:
        """The state file of this process: ``path`` itself if there is only one."""
        path = Path(path)
        if self.count == 1:
            return path
        return path.with_name(f"{path.stem}-{self.index + 1}-of-{self.count}{path.suffix}")


ALONE = Workers()


def processes() -> Any:
    """accelerate's ``PartialState``: this process's index, the number of processes, and its device.

    accelerate forms a group of CPU processes only with ``cpu=True``.
    """
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)


def accelerator(mixed_precision: str = "no", cpu: bool = False) -> Any:
    """accelerate's ``Accelerator`` for training; CPU processes form a group by gloo.

    Args:
        cpu: train on the CPU even if there is a GPU.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    cpu = cpu or not torch.accelerator.is_available()  # otherwise CPU processes do not form a group
    patient = InitProcessGroupKwargs(timeout=_PATIENCE)
    return Accelerator(mixed_precision=mixed_precision, cpu=cpu, kwargs_handlers=[patient])


def workers_of(accelerator: Any) -> Workers:
    """The processes of an ``Accelerator``, as a :class:`~vitrine.engine.jobs.run.Run` takes them."""
    index, count = accelerator.process_index, accelerator.num_processes
    return Workers(index, count, meet=accelerator.wait_for_everyone)


def world_size() -> int:
    """How many processes ``torchrun`` or ``accelerate launch`` has started; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE", 1))


def launched() -> Workers:
    """The processes that ``torchrun`` or ``accelerate launch`` has started; without a launcher nothing is imported."""
    if world_size() == 1:
        return ALONE
    from accelerate.utils import gather_object, reduce

    state = processes()

    def total(part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = reduce(part.to(state.device), "sum")
        return whole.to(part.device)

    return Workers(
        state.process_index, state.num_processes, total, lambda own: gather_object([own]), state.wait_for_everyone
    )


def cores() -> int:
    """CPU cores this process may use; 1 if there is an accelerator or ``torchrun`` has already divided it."""
    import torch

    if torch.accelerator.is_available() or world_size() > 1:
        return 1
    return max(1, torch.get_num_threads())


def side_by_side(job: Callable[[int, int], T], count: int) -> list[T]:
    """[job(0, count), ..., job(count - 1, count)], each run in a new process with one thread.

    If one raises, or Ctrl-C is pressed, the others are ended and the error is raised here. ``job`` is pickled for the
    processes, so it must be a plain function or a method of a plain object.
    """
    with _pool(count) as pool:
        return [future.result() for future in _submitted(pool, [(job, i, count) for i in range(count)])]


def each_in_turn(job: Callable[[Any], T], items: Sequence[Any], count: int) -> Iterator[T]:
    """Yields job(item) of each item as it finishes, in ``count`` processes of one thread each.

    If one raises, Ctrl-C is pressed or the caller stops iterating, the others are ended. ``job`` and items are pickled.
    """
    from concurrent.futures import as_completed

    with _pool(count) as pool:
        for future in as_completed(_submitted(pool, [(job, item) for item in items])):
            yield future.result()


@contextmanager
def _pool(count: int) -> Iterator[Any]:
    """New processes with one thread each, which end with the block, immediately if it ends by an error.

    They also end if this process is killed.
    """
    from concurrent.futures import ProcessPoolExecutor  # a slow import, which would delay ComfyUI's start

    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    with _environment(ONE_CORE), ProcessPoolExecutor(count, spawn, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BaseException:  # also on an interrupt: do not wait for the others
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _end_with_parent() -> None:
    """In a worker: starts a thread that ends it with its parent. A killed one cannot, and its workers would go on."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _submitted(pool: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Futures of calls. The processes start with SIGINT blocked: a terminal sends it to all, and this one ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        return [pool.submit(*call) for call in calls]
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # else it starts with the first process, and unblocks SIGINT afterwards
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return [pool.submit(*call) for call in calls]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: environ.get(name) for name in wanted}
    environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value
