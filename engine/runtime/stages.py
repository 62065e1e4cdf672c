"""Stages of a long command on the console: which of how many, its name, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from .progress import Progress, TqdmProgress

say = partial(print, flush=True)
RESUMED = 1.0
"""Seconds: a shorter stage was finished by an earlier call, and says nothing about the speed."""


class Stages:
    """Prints a line as each stage begins, such as ``2 of 8  What the model sees: about 2 min left``.

    Args:
        expected: name -> seconds, or another unit of work, in the order of the stages; some may be left out. None: not
            known, so no time is printed until what follows is known.
        trust: seconds of work for which ``expected`` counts as measured. 0: the unit is not the second, so no time is
            printed before a stage has been measured.
        shown: False prints nothing, for all but one of several processes.
        clock: seconds that have passed.
    """

    def __init__(
        self,
        expected: Mapping[str, float | None],
        trust: float = 0.0,
        shown: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.expected, self.shown, self._clock = dict(expected), shown, clock
        self._took = self._done = trust
        self._current, self._since = "", clock()

    def begin(self, name: str) -> None:
        """Prints the line of a stage.

        Raises:
            ValueError: If it is not in ``expected``.
        """
        now, work = self._clock(), self.expected.get(self._current) or 0.0
        if work and now - self._since >= RESUMED:
            self._took, self._done = self._took + now - self._since, self._done + work
        self._current, self._since = name, now
        names = list(self.expected)
        ahead = [self.expected[n] for n in names[names.index(name) :]]
        known = [work for work in ahead if work is not None]
        left = len(known) == len(ahead) and self._done and self._took / self._done * sum(known)
        if self.shown:
            head = f"{names.index(name) + 1} of {len(names)}  {name}" if len(names) > 1 else name
            say(f"{head}: about {duration(max(10, round(left, -1)))} left" if left else head)

    def bar(self, name: str) -> Progress:
        """Begins a stage; returns its progress bar, without a label: the line above it has one."""
        self.begin(name)
        return TqdmProgress(shown=self.shown)


def duration(seconds: float) -> str:
    """As text: seconds, minutes or hours.

    Example:
        >>> duration(24), duration(300), duration(12_000)
        ('24 s', '5 min', '3 h')
    """
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
