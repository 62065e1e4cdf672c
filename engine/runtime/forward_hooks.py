"""Registers torch's forward hooks for all methods, safely for networks that are recorded as CUDA graphs.

ComfyUI's model compiler (from 0.34) records the allocations of each block of a network, and may replay a block as one
CUDA graph. A tensor that a hook keeps outlives its block, so hooks run while the recording is paused. A replayed block
runs no Python, so :class:`Reached` refuses a result whose hooks were not called.

Two threads may run one network: a hook acts on the forwards of the thread that opened it, and on their recomputation in
autograd's threads. Hooks that belong to the network itself (its size, its control inputs) act in every thread, as all
do in ComfyUI, which runs one graph at a time and may divide a forward between threads.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from ..errors import VitrineError, refuse

Hook = Callable[..., Any]
Pause = Callable[[], AbstractContextManager]

_PAUSES: list[Pause] = []
_ANY_THREAD: list[bool] = []


def act_in_any_thread() -> Callable[[], None]:
    """From now on hooks act on forwards of every thread; returns what ends that.

    For a program that runs one thing at a time, and distributes its forwards over its threads.
    """
    _ANY_THREAD.append(True)
    return _ANY_THREAD.clear


def run_hooks_inside(pause: Pause) -> Callable[[], None]:
    """Runs each call of a hook inside ``pause()`` from now on; returns a function that ends this.

    The setting is global to the process, like the recording. ``nodes/comfy`` passes how to pause it.
    """
    _PAUSES.append(pause)
    return lambda: _PAUSES.remove(pause)


def hook_before(
    module: nn.Module, hook: Hook, *, with_kwargs: bool = False, any_thread: bool = False
) -> RemovableHandle:
    """``module.register_forward_pre_hook``."""
    return module.register_forward_pre_hook(_of_thread(_unrecorded(hook), any_thread), with_kwargs=with_kwargs)


def hook_after(
    module: nn.Module, hook: Hook, *, with_kwargs: bool = False, prepend: bool = False, any_thread: bool = False
) -> RemovableHandle:
    """``module.register_forward_hook``."""
    own = _of_thread(_unrecorded(hook), any_thread)
    return module.register_forward_hook(own, with_kwargs=with_kwargs, prepend=prepend)


def _of_thread(hook: Hook, any_thread: bool) -> Hook:
    if any_thread or _ANY_THREAD:
        return hook
    owner = threading.get_ident()

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == owner or _is_autograds() else None

    return run


def _is_autograds() -> bool:
    """Whether Python did not start the running thread."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _unrecorded(hook: Hook) -> Hook:
    if not _PAUSES:
        return hook
    pause = _PAUSES[-1]

    @functools.wraps(hook)  # keeps the attributes by which captures distinguish reading hooks from edits
    def run(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return hook(*args, **kwargs)

    return run


def block_of(path: str) -> str:
    """The block that a layer is in: its path up to the first number. A block is run or replayed as a whole.

    Example:
        >>> block_of("transformer_blocks.3.attn.to_q"), block_of("time_embed")
        ('transformer_blocks.3', 'time_embed')
    """
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return numbered[0] if numbered else path


class OneBlock(AbstractContextManager):
    """Base of changes to a network that act from their construction until they are closed, entered by one ``with``.

    A second ``with`` would end with nothing, or end the first.
    """

    _entered = False

    def __enter__(self) -> Self:
        if self._entered:
            raise refuse("block", "entered before", "one `with` for each", "make a second one")
        self._entered = True
        return self


class Unreached(VitrineError):
    """Forwards ended without calling the hooks that should have read or changed them."""


class Reached:
    """Checks that every hooked layer was run by the forwards that ended while a block was open.

    Args:
        what: the block, for the error: "edit", "tap", "LoRA".
    """

    def __init__(self, what: str) -> None:
        self.what, self.forwards, self.elsewhere = what, 0, 0
        self._thread = threading.get_ident()
        self._silent, self._handles = set[str](), list[RemovableHandle]()

    def watch(self, backbone: nn.Module) -> None:
        """Count completed forwards. An early-exited forward is not counted: later sites were never reached."""
        self._handles.append(hook_after(backbone, lambda *_: self._ended(), any_thread=True))

    def through(self, layer: nn.Module, name: str) -> None:
        """Expect a layer that has no other hook to be reached."""
        self._handles.append(hook_before(layer, self.noting(name, lambda *_: None)))

    def close(self) -> None:
        """Stop checking; idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _ended(self) -> None:
        if _ANY_THREAD or threading.get_ident() == self._thread:
            self.forwards += 1
        else:
            self.elsewhere += 1

    def expect(self, name: str) -> None:
        """Expect a layer to be reached."""
        self._silent.add(name)

    def note(self, name: str) -> None:
        """Record that a layer was reached."""
        self._silent.discard(name)

    def noting(self, name: str, hook: Hook) -> Hook:
        """Expects a layer to be reached, and returns its hook, which records its calls."""
        self.expect(name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._silent.discard(name)
            return hook(*args, **kwargs)

        return run

    def check(self) -> None:
        """Stop checking, and raise if no forward reached a layer.

        Raises:
            Unreached: If forwards ended and none called an expected hook, or all ended in other threads.
        """
        self.close()
        if self._silent and self.elsewhere and not self.forwards:
            shown, accepted = f"{self.elsewhere} forwards in other threads", "forwards in the thread that opened it"
            raise Unreached(str(refuse(self.what, shown, accepted, "open it in the thread that runs the network")))
        if self.forwards and self._silent:
            count, first = len(self._silent), min(self._silent)
            shown = f"{count} layers that {self.forwards} forwards never reached: {first} ..."
            remedy = (
                "call unfuse_qkv_projections(), compile the network before the block is opened, and start ComfyUI with "
                "--disable-cuda-graphs if it replays the network"
            )
            raise Unreached(str(refuse(self.what, shown, "layers that the network runs through", remedy)))
