"""Networks compiled by ``torch.compile``: hooks must fire in them too.

Compiled code is made once and knows nothing of hooks added later: they would be ignored without a word. So while hooks
are open on a compiled network, compiled functions run as plain Python; the compiled code is kept, and used again after.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn

from ..errors import refuse


def uncompiled(module: nn.Module) -> nn.Module:
    """The network inside ``torch.compile(network)``; any other module as it is."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: nn.Module) -> bool:
    """Whether forwards of it, or of a part, run compiled code."""
    if hasattr(module, "_orig_mod"):
        return True
    return any(
        getattr(child, "_compiled_call_impl", None) is not None
        or hasattr(vars(child).get("forward"), "_torchdynamo_orig_callable")
        for child in module.modules()
    )


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
                EagerRuns._stance = _force_eager()
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


def _force_eager() -> object:
    if not hasattr(torch.compiler, "set_stance"):
        shown = f"a compiled network under PyTorch {torch.__version__}"
        raise refuse("network", shown, "PyTorch 2.6 or newer", "upgrade, or load the network without torch.compile")
    return torch.compiler.set_stance("force_eager")


def eager_runs(module: nn.Module) -> list[EagerRuns]:
    """A handle to add to the hooks that are opened on a network: none in a process that has not compiled anything.

    Whether *this* network was compiled cannot be seen on it: ``torch.compile(network)`` leaves the network as it was,
    and what is compiled while hooks are open would keep them for ever.
    """
    started = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    return [EagerRuns()] if started or is_compiled(module) else []
