"""Applies a plan to rotary embeddings of diffusers transformers; families define how each is computed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..diffusion.forward_clock import Timesteps
from ..errors import refuse
from ..families import FAMILIES
from ..runtime.forward_hooks import hook_after, hook_before
from .plan import Plan
from .rope import DYNAMIC, axis_angles, frequencies
from .undoable import Watched

Named = dict[str, Any]
_READERS = {kind: family for family in FAMILIES for kind in family.rope_readers}
_TABLED = {kind: family for family in FAMILIES for kind in family.rope_tables}
"""Class of a rotary embedding -> the family that defines how it is computed."""


def rotary_part(backbone: nn.Module) -> tuple[str, Any]:
    """(path, embedding) of the rotary positions; ("", it) if it is not a module (Z-Image); ("", None) without one."""
    for path, module in backbone.named_modules():
        if is_rotary(module):
            return path, module
    plain = getattr(backbone, "rope_embedder", None)
    return "", plain if type(plain).__name__ in _TABLED else None


def is_rotary(part: Any) -> bool:
    """Whether an object is a rotary embedding of a known family."""
    return type(part).__name__ in _READERS or type(part).__name__ in _TABLED


def turned(
    ids: torch.Tensor, dims: Sequence[int], theta: Any, plan: Plan, tau: float = 1.0
) -> tuple[torch.Tensor, float]:
    """(angles (..., sum of dims / 2), factor on cosines and sines) of positions (..., axes) under a plan's mode."""
    angles, factor = axis_angles(ids.float(), dims, theta, plan.positions, plan.scales, plan.train, tau)
    return torch.cat(angles, -1), factor


def _tables(part: Any, plan: Plan, tau: float) -> list[torch.Tensor]:
    dims = getattr(part, _TABLED[type(part).__name__].rope_tables[type(part).__name__])
    scaled, factor = frequencies(dims, (part.theta,) * len(dims), plan.positions, plan.scales, plan.train, tau)
    angles = [torch.outer(torch.arange(n).double(), f) for n, f in zip(part.axes_lens, scaled, strict=True)]
    kind = torch.complex64 if part.freqs_cis is None else part.freqs_cis[0].dtype
    return [torch.polar(torch.full_like(a, factor), a).to(kind) for a in angles]


# --- applying it ----------------------------------------------------------------------------------------------------
class RotaryPositions(Watched):
    """Applies a plan's rotary mode to a diffusers backbone, from construction until :meth:`close`.

    Weights and the embedding's tables are never modified.
    """

    def __init__(self, backbone: nn.Module, plan: Plan) -> None:
        path, part = rotary_part(backbone)
        super().__init__("rotary positions")
        self.plan, self.tau = plan, 1.0
        family = (_READERS | _TABLED)[type(part).__name__]
        if type(part).__name__ in _TABLED:
            part = self._tabled(backbone, path, part)
        else:
            recompute = self.reached.noting(path, self._recompute)
            self._undo.append(hook_after(part, recompute, with_kwargs=True, any_thread=True).remove)
            self.reached.watch(backbone)
        if plan.positions.endswith(DYNAMIC):
            timesteps = Timesteps()

            def follow(net: nn.Module, args: tuple, kwargs: Named) -> None:
                named = _named(net, args, kwargs)
                own = next(named[n] for n in ("timestep", "timesteps", "t") if named.get(n) is not None)
                t = timesteps.rows((), {"timestep": own})
                assert t is not None
                if not bool((t == t[0]).all()):
                    raise refuse("timesteps", t.tolist(), "one for the whole batch", "take a mode without _dynamic")
                fraction = float(t[0])
                # 1 .. 0, from the network's timestep argument
                self.tau = {"s": fraction, "1 - s": 1 - fraction}.get(family.time_input, fraction / 1000)
                if type(part).__name__ in _TABLED:
                    part.freqs_cis = _tables(part, plan, self.tau)

            self._undo.append(hook_before(backbone, follow, with_kwargs=True, any_thread=True).remove)

    def _recompute(self, part: Any, args: tuple, kwargs: Named, output: Any) -> Any:
        read = _READERS[type(part).__name__].rope_readers[type(part).__name__]
        named = _named(part, args, kwargs)
        return read(part, named, lambda ids, dims, theta: turned(ids, dims, theta, self.plan, self.tau))

    def _tabled(self, backbone: nn.Module, path: str, old: Any) -> Any:
        """Replaces the embedding by a copy with new tables; the original is restored unchanged."""
        new, name = copy.copy(old), path or "rope_embedder"
        new.freqs_cis = _tables(old, self.plan, 1.0)
        parent, _, name = name.rpartition(".")
        self._swap(backbone.get_submodule(parent), name, new)
        return new


def _named(module: nn.Module, args: tuple, kwargs: Named) -> Named:
    """A forward's arguments by name."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
