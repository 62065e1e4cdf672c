"""Runs of ComfyUI's prompt worker, as what renders between them must see them.

Clones of a MODEL share one network, which carries one set of patches, and core's lists of loaded models know no
threads: either the worker uses them or a panel does. The worker waits for a picture that is being rendered, outside of
the queue's mutex, so that the server keeps answering; a panel does not wait for a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PAUSE = 1.0
"""Seconds for which a panel waits while the worker collects garbage between two runs."""


class Busy(Exception):
    """A graph runs or is about to: models cannot be used meanwhile."""


class RunWatch:
    """Keeps the worker and the panels apart.

    Attributes:
        finished: called with a run's item of the queue and its outputs, before any page hears that the run has ended.
        freed: called on the worker's thread with core's flags, ``unload_models`` or ``free_memory``, before it acts on
            them.
    """

    def __init__(self) -> None:
        self.finished: list[Callable[[Any, Mapping[str, Any]], None]] = []
        self.freed: list[Callable[[Mapping[str, Any]], None]] = []
        self._changed = threading.Condition()
        self._workers: set[threading.Thread] = set()
        self._rendering, self._waiting = False, 0
        self._queue: Any = None

    def watch(self, queue: Any) -> None:
        """Follow a PromptQueue. One without these methods is only looked at."""
        self._queue = queue
        if not all(callable(getattr(queue, name, None)) for name in ("get", "task_done", "get_flags")):
            return
        get, task_done, get_flags, items = queue.get, queue.task_done, queue.get_flags, {}  # type: ignore[var-annotated]

        def watched_get(*args: Any, **kwargs: Any) -> Any:
            self._leave()
            got = get(*args, **kwargs)
            self._enter()
            if got is not None:
                items[got[1]] = got[0]
            return got

        def watched_task_done(item_id: Any, history_result: Any, *args: Any, **kwargs: Any) -> Any:
            item = items.pop(item_id, None)
            for act in self.finished:
                act(item, (history_result or {}).get("outputs") or {})
            return task_done(item_id, history_result, *args, **kwargs)

        def watched_flags(*args: Any, **kwargs: Any) -> Any:
            flags = get_flags(*args, **kwargs)
            for act in self.freed if flags else ():
                act(flags)
            return flags

        queue.get, queue.task_done, queue.get_flags = watched_get, watched_task_done, watched_flags

    @property
    def wanted(self) -> bool:
        """Whether a run waits for the models, or is on."""
        return self._waiting > 0 or self._runs() > 0

    @contextmanager
    def between_runs(self) -> Iterator[None]:
        """While open, the models are the caller's; the worker waits.

        Raises:
            Busy: A run is on or waits, or somebody else renders.
        """
        if self._runs():
            raise Busy
        with self._changed:
            if not self._changed.wait_for(self._free, PAUSE):
                raise Busy
            self._rendering = True
        try:
            if self._runs():  # came meanwhile
                raise Busy
            yield
        finally:
            with self._changed:
                self._rendering = False
                self._changed.notify_all()

    def _runs(self) -> int:
        """Runs that are on or wait; the queue's mutex is locked only to look."""
        look = getattr(self._queue, "get_tasks_remaining", None)
        return look() if look else 0

    def _free(self) -> bool:
        self._workers = {thread for thread in self._workers if thread.is_alive()}
        return not self._workers and not self._rendering

    def _enter(self) -> None:
        """The worker has something to do: it has the models until it comes back for more."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._rendering)
            self._waiting -= 1
            self._workers.add(threading.current_thread())

    def _leave(self) -> None:
        with self._changed:
            self._workers.discard(threading.current_thread())
            self._changed.notify_all()


RUNS = RunWatch()
"""Of this process's server."""


def register() -> None:
    """Follow the server's queue, where there is one."""
    from server import PromptServer

    queue = getattr(getattr(PromptServer, "instance", None), "prompt_queue", None)
    if queue is not None:
        RUNS.watch(queue)
