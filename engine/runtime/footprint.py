"""Memory budgets: parsing them, and how many batch rows fit into one, measured on a single row."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import refuse
from .compat_torch import TorchDispatchMode, storage_key, tree_leaves

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LEAST = 2**20


def memory_bytes(memory: int | str) -> int:
    """A budget in bytes from a number, or a text such as "2GB" or "500 MiB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    unit = match[2].lower() if match else ""
    size = float(match[1]) * _UNITS.get(unit, 0) if match and len(match[1]) < 20 else 0
    if isinstance(memory, bool) or size < _LEAST:
        raise refuse(
            "memory",
            f"{memory!s:.80}",
            "1 MiB or more, in bytes or as '2GB'",
            "a fifth of what is free is a good start",
        )
    return int(size)


class Peak(TorchDispatchMode):
    """Measures the largest number of bytes allocated at once by tensors made in the block, on any device.

    Attributes:
        peak: the largest number so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {storage_key(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for output in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(output, torch.Tensor):
                self._count(output.untyped_storage(), inputs)
        return out

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key not in self._alive and key not in inputs:  # a view of a weight is not an allocation
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def rows_within(budget: int, one_row: Callable[[], Any], most: int) -> int:
    """How many batch rows fit into the budget together, from 1 to ``most``.

    Args:
        one_row: runs one batch row; called twice, since the first call may move weights.
    """
    with torch.no_grad():
        one_row()
        with Peak() as held:
            one_row()
    return max(1, min(most, budget // max(1, held.peak)))
