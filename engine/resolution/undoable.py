"""Changes of a network or pipeline that are undone when a block is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.forward_hooks import OneBlock, Reached


class Undoable(OneBlock):
    """Base of what changes attributes and adds hooks until :meth:`close`."""

    def __init__(self) -> None:
        self._undo = list[Callable[[], None]]()

    def _swap(self, owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        self.close()
        if error[0] is None:
            self._check()

    def close(self) -> None:
        """Restore everything, the last change first; idempotent."""
        while self._undo:
            self._undo.pop()()

    def _check(self) -> None:
        """Refuses a change that never acted."""


class Watched(Undoable):
    """A change that tells whether it acted.

    Attributes:
        reached: its hooks, and whether they were called.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.reached = Reached(what)

    def close(self) -> None:
        """Restore everything; idempotent."""
        self.reached.close()
        super().close()

    def _check(self) -> None:
        self.reached.check()
