"""Forwards that core has to run in Python, layer by layer: hooks see nothing of a network that it replays instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import comfy.patcher_extension
import torch

from ...engine.runtime.forward_hooks import Unreached, act_in_any_thread, run_hooks_inside
from . import compat_comfyui as core

_KEY = "vitrine.python"
_NETWORK = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL


class PythonForward(AbstractContextManager):
    """Around one forward with hooks on the network, which end inside the block.

    Core decides about replaying after every other wrapper has run, and says so in ``prefetch_dynamic_vbars``; only a
    wrapper of the network's own forward comes later. Where another node's wrapper answers instead of the network, as a
    cache does, or leaves out blocks, there is nothing that hooks could have read or changed.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        wrappers = dict(options.get("wrappers", {}))
        others = dict(wrappers.get(_NETWORK, {}))
        own = others.pop(_KEY, [])
        self._ran, self._answered_elsewhere = False, any(others.values())
        self._leaves_out = bool(options.get("patches_replace", {}).get("dit"))
        # the last one is the innermost
        self.wrappers = wrappers | {_NETWORK: others | {_KEY: [*own, self._run]}}

    def _run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._ran = True
        for value in (*args, *kwargs.values()):
            if isinstance(value, dict) and "prefetch_dynamic_vbars" in value:
                value["prefetch_dynamic_vbars"] = False
        # autograd keeps what a block allocates until the backward pass
        keeps = torch.is_grad_enabled() and core.newer("pause_malloc_graph")
        with core.unrecorded() if keeps else nullcontext():
            return executor(*args, **kwargs)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, Unreached) and (self._leaves_out or (self._answered_elsewhere and not self._ran))


def guard_hooks() -> Callable[[], None]:
    """Keep what hooks allocate out of core's recordings, where it makes any; returns what ends that."""
    return run_hooks_inside(core.unrecorded) if core.newer("pause_malloc_graph") else lambda: None


guard_hooks()
act_in_any_thread()  # with several GPUs core shares the parts of a forward out to threads
