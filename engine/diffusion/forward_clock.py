"""The timestep of the running forward, read once from the backbone's arguments for every hook that needs it."""

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
from ..runtime.compat_torch import source_of, version_of
from ..runtime.compiled import eager_runs, uncompiled
from ..runtime.forward_hooks import Hook, Reached, hook_after, hook_before


class Forward(NamedTuple):
    """A forward of the backbone: its timesteps (B,) float64 on the CPU, its noisy input, its arguments by name."""

    t: torch.Tensor
    sample: torch.Tensor
    arguments: dict[str, Any]


class Timesteps:
    """Reads the timesteps that a hook on the backbone sees, with one device synchronisation per run.

    Samplers pass views of one tensor of timesteps, so the whole tensor is read when its first view arrives.
    They are the argument called ``timestep`` (diffusers) or ``timesteps`` (ComfyUI), else the second positional one,
    as in both libraries.
    """

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self._version = -1
        self._values = torch.empty(0)

    def rows(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The timesteps (n,), float64 on the CPU; None if the forward has none."""
        value = kwargs.get("timestep", kwargs.get("timesteps", args[1] if len(args) > 1 else None))
        if not isinstance(value, (torch.Tensor, int, float)):
            return None
        t = torch.as_tensor(self._on_cpu(value), dtype=torch.float64, device="cpu").reshape(-1)
        return t if t.numel() else None

    def first(self, args: tuple, kwargs: dict[str, Any]) -> float | None:
        """The timestep of the first batch row, if all rows share it; None if the forward has none."""
        t = self.rows(args, kwargs)
        return None if t is None else float(t[0])

    def _on_cpu(self, value: torch.Tensor | float) -> torch.Tensor | float:
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu" or value.is_inference():
            return value
        source = source_of(value)
        if not source.is_contiguous() or source.storage_offset():
            return value
        if source is not self._source or version_of(source) != self._version:
            self._source, self._version, self._values = source, version_of(source), source.detach().cpu()
        return self._values.as_strided(value.shape, value.stride(), value.storage_offset())


class ForwardClock(AbstractContextManager):
    """Base of the blocks whose hooks depend on the running forward's timestep.

    Hooks are added on enter and removed on exit, also after an error. State of a forward is thread-local, so two
    threads may run one model. Gradient checkpointing recomputes blocks in another thread, which uses the state of the
    last forward.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone, self._compiled = uncompiled(backbone), backbone
        self._handles: list[Any] = []
        self._reached = Reached(type(self).__name__.lstrip("_"))
        self._local = threading.local()
        self._last: Any = None
        self._timesteps = Timesteps()  # kept after the block closes: samplers reopen it in each step

    def __enter__(self) -> Self:
        if self._handles:
            raise refuse("block", "open already", "one at a time", "leave it first, or make a second one")
        try:
            self._handles += eager_runs(self._compiled)
            self._reached = Reached(self._reached.what)
            self._handles.append(hook_before(self.backbone, self._see, with_kwargs=True, any_thread=True))
            self._open()
            self._reached.watch(self.backbone)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if error[0] is None:
            self._reached.check()

    def _after(self, path: str, hook: Hook) -> None:
        """A hook on a layer's output; leaving the block raises if forwards ended without calling it."""
        layer = self.backbone.get_submodule(path)
        self._handles.append(hook_after(layer, self._reached.noting(path, hook), any_thread=True))

    def close(self) -> None:
        """Remove all hooks and the state of the last forward; idempotent."""
        self._reached.close()
        while self._handles:
            self._handles.pop().remove()
        self._local, self._last = threading.local(), None

    def _open(self) -> None:
        """Register the hooks of the block, into ``_handles``."""
        raise NotImplementedError

    def _prepare(self, forward: Forward) -> Any:
        """What the hooks need during this forward; they read it as ``_now``."""
        raise NotImplementedError

    def _see(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = {**dict(zip(_names(type(module).forward), args, strict=False)), **kwargs}
        sample = arguments.get("sample", arguments.get("hidden_states"))
        t = self._timesteps.rows(args, kwargs | {k: v for k, v in arguments.items() if k == "timestep"})
        if t is None or sample is None:
            raise refuse("forward", sorted(arguments), "a sample and a timestep", "call the model with both")
        self._local.value = self._last = self._prepare(Forward(t.expand(len(sample)), sample, arguments))

    @property
    def _now(self) -> Any:
        return getattr(self._local, "value", self._last)


@functools.cache
def _names(forward: Callable) -> tuple[str, ...]:
    """The argument names of a forward, in order, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def rows_for(values: torch.Tensor, count: int, what: str) -> torch.Tensor:
    """(B, ...) for a batch of ``count`` rows, from ``count`` rows or from one."""
    if len(values) not in (1, count):
        raise refuse(what, f"{len(values)} values", f"1 or {count}", "one a picture, guidance included")
    return values.expand(count, *values.shape[1:])
