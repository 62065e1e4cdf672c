"""Networks compiled by ``torch.compile``: hooks must fire in them too.

Compiled code is made once and knows nothing of hooks added later: they would be ignored without a word. So while hooks
are open on a compiled network, compiled functions run as plain Python; the compiled code is kept, and used again after.
"""

from __future__ import annotations

import threading

from torch import nn

from .compat_torch import force_eager, has_compiled, is_compiled
from .compat_torch import uncompiled as uncompiled


class EagerRuns:
    """A handle like those of torch's hooks: until ``remove()``, compiled code of this process runs as plain Python.

    Raises:
        VitrineError: If this PyTorch cannot switch compiled code off for a while (before 2.6).
    """

    # torch's switch is one for the whole process, so its users are counted for the whole process.
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
        """Allow compiled code again, once nobody else needs plain Python; harmless twice."""
        with self._lock:
            if self._removed:
                return
            self._removed = True
            EagerRuns._open -= 1
            if not EagerRuns._open:
                EagerRuns._stance.__exit__(None, None, None)  # type: ignore[attr-defined]
                EagerRuns._stance = None


def eager_runs(module: nn.Module) -> list[EagerRuns]:
    """A handle to add to the hooks that are opened on a network: none in a process that has not compiled anything.

    Whether *this* network was compiled cannot be seen on it: ``torch.compile(network)`` leaves the network as it was,
    and what is compiled while hooks are open would keep them for ever.
    """
    return [EagerRuns()] if has_compiled() or is_compiled(module) else []
