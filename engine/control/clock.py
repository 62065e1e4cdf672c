"""Hooks that know the time: the timestep of the running forward, read from the backbone's own argument."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import Self

from ..errors import refuse


class Call(NamedTuple):
    """A forward of the backbone: its timesteps (B,) float64 on the CPU, its noisy input, its arguments by name."""

    t: torch.Tensor
    sample: torch.Tensor
    arguments: dict[str, Any]


class Clocked(AbstractContextManager):
    """Base of the blocks that hook a backbone: hooks are added on enter and removed on exit, also after an error.

    What a forward is told lives in thread-local storage, so two threads may run one model. Gradient checkpointing
    recomputes blocks in a thread of its own; there the last forward counts.

    Raises:
        VitrineError: on enter, when the block is open already; in a forward, when no timestep was given.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone
        self._handles: list[Any] = []
        self._local = threading.local()
        self._last: Any = None

    def __enter__(self) -> Self:
        if self._handles:
            raise refuse("block", "open already", "one at a time", "leave it first, or make a second one")
        try:
            self._handles.append(self.backbone.register_forward_pre_hook(self._see, with_kwargs=True))
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks and forget the last forward; harmless twice."""
        while self._handles:
            self._handles.pop().remove()
        self._local, self._last = threading.local(), None

    def _open(self) -> None:
        raise NotImplementedError

    def _told(self, call: Call) -> Any:
        """What the hooks of this forward need."""
        raise NotImplementedError

    def _see(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = _signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        sample = arguments.get("sample", arguments.get("hidden_states"))
        timestep = arguments.get("timestep")
        if timestep is None or sample is None:
            raise refuse("forward", sorted(arguments), "a sample and a timestep", "call the model with both")
        t = torch.as_tensor(timestep, dtype=torch.float64, device="cpu").reshape(-1).expand(len(sample))
        self._local.told = self._last = self._told(Call(t, sample, arguments))

    @property
    def _now(self) -> Any:
        return getattr(self._local, "told", self._last)


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def rows_for(values: torch.Tensor, count: int, what: str) -> torch.Tensor:
    """(B, ...) for a batch of ``count``, from as many rows or one.

    Raises:
        VitrineError: another number of rows.
    """
    if len(values) not in (1, count):
        raise refuse(what, f"{len(values)} rows", f"1 or {count}", "one for each row of the batch, guidance included")
    return values.expand(count, *values.shape[1:])
