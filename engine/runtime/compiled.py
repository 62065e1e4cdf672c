"""Networks compiled by ``torch.compile``: hooks must fire in them too.

Compiled code ignores hooks that are added later. While hooks are open on a compiled network, compiled functions
therefore run as plain Python; the compiled code is kept and used again afterwards.
"""

from __future__ import annotations

import threading

from torch import nn

from .compat_torch import force_eager, has_compiled, is_compiled
from .compat_torch import uncompiled as uncompiled


class EagerRuns:
    """A handle like those of torch's hooks: until ``remove()``, compiled code of this process runs as plain Python."""

    # torch's switch is global to the process, so its users are counted per process.
    _lock = threading.Lock()
    _open = 0
    _stance: object = None

    def __init__(self) -> None:
        self._removed = False
        with self._lock:
            if not EagerRuns._open:
                EagerRuns._stance = force_eager()
            EagerRuns._open += 1

    def remove(self) -> None:
        """Allow compiled code again once no other handle is open; idempotent."""
        with self._lock:
            if self._removed:
                return
            self._removed = True
            EagerRuns._open -= 1
            if not EagerRuns._open:
                EagerRuns._stance.__exit__(None, None, None)  # type: ignore[attr-defined]
                EagerRuns._stance = None


def eager_runs(module: nn.Module) -> list[EagerRuns]:
    """The handle to open with hooks on a network; empty if the process has not compiled anything.

    Whether *this* network was compiled cannot be seen on it: ``torch.compile(network)`` does not change the network,
    and code compiled while hooks are open would keep them.
    """
    return [EagerRuns()] if has_compiled() or is_compiled(module) else []
