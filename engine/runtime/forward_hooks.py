"""Torch's forward hooks, opened here by every method: a recorded network must neither break on them nor skip them.

ComfyUI's model compiler (from 0.34) notes what each block of a network allocates, and may run a block again as one CUDA
graph. A tensor that a hook keeps outlives its block, so hooks run while that recording pauses. A replayed block runs no
Python, so :class:`Reached` refuses a result that hooks should have read or changed and did not.

Two threads may run one network: a hook acts on the forwards of the thread that opened it, and on what autograd's own
threads compute again of them. ComfyUI, which runs one graph at a time, may share a forward out to threads.
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

from ..errors import VitrineError, refuse

Hook = Callable[..., Any]
Pause = Callable[[], AbstractContextManager]

_PAUSES: list[Pause] = []
_ANY_THREAD: list[bool] = []


def act_in_any_thread() -> Callable[[], None]:
    """From now on hooks act on forwards of every thread; returns what ends that.

    For a program that runs one thing at a time, and shares its forwards out to threads of its own.
    """
    _ANY_THREAD.append(True)
    return _ANY_THREAD.clear


def run_hooks_inside(pause: Pause) -> Callable[[], None]:
    """From now on each call of a hook that is opened runs inside ``pause()``; returns what ends that.

    The recording belongs to the process, and so does this. Who knows of the recorder says how it is paused.
    """
    _PAUSES.append(pause)
    return lambda: _PAUSES.remove(pause)


def hook_before(module: nn.Module, hook: Hook, *, with_kwargs: bool = False) -> RemovableHandle:
    """``module.register_forward_pre_hook``."""
    return module.register_forward_pre_hook(_of_this_thread(_unrecorded(hook)), with_kwargs=with_kwargs)


def hook_after(
    module: nn.Module, hook: Hook, *, with_kwargs: bool = False, prepend: bool = False
) -> RemovableHandle:  # fmt: skip
    """``module.register_forward_hook``."""
    own = _of_this_thread(_unrecorded(hook))
    return module.register_forward_hook(own, with_kwargs=with_kwargs, prepend=prepend)


def _of_this_thread(hook: Hook) -> Hook:
    if _ANY_THREAD:
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

    @functools.wraps(hook)  # with its attributes, by which captures tell readers from edits
    def run(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return hook(*args, **kwargs)

    return run


def block_of(path: str) -> str:
    """The block that a layer is in: its path up to the first number. A block is run, or replayed, as a whole.

    Example:
        >>> block_of("transformer_blocks.3.attn.to_q"), block_of("time_embed")
        ('transformer_blocks.3', 'time_embed')
    """
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return numbered[0] if numbered else path


class Unreached(VitrineError):
    """Forwards ended without a call of the hooks that should have read or changed them."""


class Reached:
    """Whether each layer that a block has hooks on was run by the forwards that ended while the block was open.

    Args:
        what: the block, for the error: "edit", "tap", "LoRA".
    """

    def __init__(self, what: str) -> None:
        self.what, self.forwards = what, 0
        self._silent, self._handles = set[str](), list[RemovableHandle]()

    def watch(self, backbone: nn.Module) -> None:
        """Count forwards that end; one that is stopped early says nothing about later layers."""
        self._handles.append(hook_after(backbone, lambda *_: self._ended()))

    def through(self, layer: nn.Module, name: str) -> None:
        """A layer that has to be reached, and has no hook."""
        self._handles.append(hook_before(layer, self.noting(name, lambda *_: None)))

    def close(self) -> None:
        """Stop looking; harmless twice."""
        while self._handles:
            self._handles.pop().remove()

    def _ended(self) -> None:
        self.forwards += 1

    def expect(self, name: str) -> None:
        """A layer that has to be reached."""
        self._silent.add(name)

    def note(self, name: str) -> None:
        """It has been."""
        self._silent.discard(name)

    def noting(self, name: str, hook: Hook) -> Hook:
        """The hook of a layer that has to be reached, which notes its calls."""
        self.expect(name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._silent.discard(name)
            return hook(*args, **kwargs)

        return run

    def check(self) -> None:
        """Stop looking, and refuse a layer that no forward reached.

        Raises:
            Unreached: Forwards ended, and hooks were not called in any.
        """
        self.close()
        if self.forwards and self._silent:
            count, first = len(self._silent), min(self._silent)
            shown = f"{count} layers that {self.forwards} forwards never reached: {first} ..."
            remedy = (
                "call unfuse_qkv_projections(), compile the network before the block is opened, and start ComfyUI with "
                "--disable-cuda-graphs if it replays the network"
            )
            raise Unreached(str(refuse(self.what, shown, "layers that the network runs through", remedy)))
