"""Gradient checkpointing for networks whose weights do not fit in memory twice.

A layer whose weights are kept in half precision, or on another device, computes with a copy, and autograd keeps every
copy until the backward pass: twice the checkpoint's size for float16 computed in float32. Here each part keeps only its
inputs and is recomputed in the backward pass (Chen et al. 2016, arXiv 1604.06174; ``torch.utils.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..runtime.forward_hooks import hook_before

SHARE = 12
"""Largest fraction of the weights in one part, where the network's structure allows."""


def copies_its_weights(backbone: nn.Module, device: torch.device) -> bool:
    """Whether a float32 computation on ``device`` needs a copy of any weight."""
    return any(p.dtype != torch.float32 or p.device != device for p in backbone.parameters())


def parts_of(backbone: nn.Module, run: Callable[[], Any]) -> list[nn.Module]:
    """The modules to checkpoint: the largest that ``run`` calls with at most that fraction of the weights.

    One forward shows which modules are called; a container whose children are called directly is not.
    """
    called: set[nn.Module] = set()
    hooks = [hook_before(m, lambda module, _: called.add(module)) for m in backbone.modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(_parts(backbone, called, _size(backbone) / SHARE))


def _parts(module: nn.Module, called: set[nn.Module], most: float) -> Iterator[nn.Module]:
    for child in module.children():
        size = _size(child)
        if child in called and (size <= most or not any(m in called for m in child.modules() if m is not child)):
            if size:
                yield child
        else:
            yield from _parts(child, called, most)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def computed_again(parts: list[nn.Module]) -> Iterator[None]:
    """While open, the parts keep only their inputs for the backward pass. Hooks inside them run in both passes.

    Dictionaries among the arguments are copied: ComfyUI writes into its options during the forward.
    """
    unset = object()
    before = [(part, vars(part).get("forward", unset)) for part in parts]

    def again(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any, **named: Any) -> Any:
            values = tuple(dict(v) if isinstance(v, dict) else v for v in values)
            named = {k: dict(v) if isinstance(v, dict) else v for k, v in named.items()}
            return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)

        return run

    try:
        for part in parts:
            part.forward = again(part.forward)  # type: ignore[method-assign]
        yield
    finally:
        for part, old in before:
            if old is unset:
                del part.forward
            else:
                part.forward = old  # type: ignore[method-assign]
