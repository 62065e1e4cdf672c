"""One thread that renders for the page's panels: of each panel its newest request, panels in turn.

A request that is replaced by a newer one of the same panel is never rendered, nor is one whose tab is closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .run_watch import RUNS, Busy, RunWatch

REST = 30.0
"""Seconds without a request after which the thread ends."""


class Superseded(Exception):
    """A newer request of the same panel came."""


class Gone(Exception):
    """The answer is not needed any more."""


@dataclass(frozen=True)
class _Request:
    """What waits.

    Attributes:
        work: renders; it calls its argument between two stages.
        gone: whether the page has gone.
        answer: what the server waits for.
    """

    work: Callable[[Callable[[], None]], Any]
    gone: Callable[[], bool]
    answer: Future = field(default_factory=Future)


class RenderThread:
    """Started by the first request, ended after a rest."""

    def __init__(self, runs: RunWatch) -> None:
        self._runs, self._changed = runs, threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: OrderedDict[Hashable, _Request] = OrderedDict()

    def ask(
        self, panel: Hashable, work: Callable[[Callable[[], None]], Any], gone: Callable[[], bool] = lambda: False
    ) -> Future:
        """What ``work`` returns, or raises: also Busy during a run, Superseded and Gone.

        Args:
            panel: whose request it is: the newest of one panel replaces those that wait, and keeps their turn.
            work: renders; calls its argument between two stages, which raises where going on is of no use.
            gone: whether the answer is not needed any more.
        """
        request = _Request(work, gone)
        with self._changed:
            replaced, self._waiting[panel] = self._waiting.get(panel), request
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="vitrine-render", daemon=True)
                self._thread.start()
            self._changed.notify()
        if replaced is not None and replaced.answer.set_running_or_notify_cancel():
            replaced.answer.set_exception(Superseded())
        return request.answer

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: self._waiting, REST):
                    self._thread = None
                    return
                request = self._waiting.popitem(last=False)[1]
            if not request.answer.set_running_or_notify_cancel():
                continue
            try:
                request.answer.set_result(self._rendered(request))
            except Exception as error:  # the waiting request answers with it
                request.answer.set_exception(error)
            except BaseException:  # core's interrupt, which is meant for a run
                request.answer.set_exception(Busy())
            del request

    def _rendered(self, request: _Request) -> Any:
        def check() -> None:
            if request.gone():
                raise Gone
            if self._runs.wanted:
                raise Busy

        if request.gone():
            raise Gone
        with self._runs.between_runs():
            return request.work(check)


RENDERS = RenderThread(RUNS)
"""Of this process's panels."""
