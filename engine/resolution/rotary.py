"""The rotary embeddings of diffusers' transformers under a plan: one reader for each class, put in and taken out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from .plan import Plan
from .rope import DYNAMIC, axis_angles, frequencies, turns

Named = dict[str, Any]
_THETA = 10000.0
"""Of Wan and Cosmos, whose modules do not say it."""
_RISING = ("ZImageTransformer2DModel", "Lumina2Transformer2DModel")
"""Networks that are told 1 - tau."""
_THOUSANDS = ("WanTransformer3DModel", "HiDreamImageTransformer2DModel")
"""Networks that are told 1000 tau."""


def rotary_part(backbone: nn.Module) -> tuple[str, Any]:
    """(path, embedding) of the rotary positions; ("", it) where it is no module (Z-Image); ("", None) without one."""
    for path, module in backbone.named_modules():
        if type(module).__name__ in _READERS or type(module).__name__ in _TABLED:
            return path, module
    plain = getattr(backbone, "rope_embedder", None)
    return "", plain if type(plain).__name__ in _TABLED else None


def is_rotary(part: Any) -> bool:
    """Whether a part is one of these embeddings."""
    return type(part).__name__ in _READERS or type(part).__name__ in _TABLED


# --- one reader for each class --------------------------------------------------------------------------------------
def rotary(
    ids: torch.Tensor, dims: list[int], theta: float, plan: Plan, tau: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(cosines, sines), each (N, sum of dims) float32, in FluxPosEmbed's layout, under a plan's rotary mode."""
    angles, factor = _angles(ids, dims, theta, plan, tau)
    wide = angles.repeat_interleave(2, -1)
    return (factor * wide.cos()).float(), (factor * wide.sin()).float()


def _angles(ids: torch.Tensor, dims: Any, theta: Any, plan: Plan, tau: float) -> tuple[torch.Tensor, float]:
    angles, factor = axis_angles(ids.float(), dims, theta, plan.positions, plan.scales, plan.train, tau)
    return torch.cat(angles, -1), factor


def _grid(
    frames: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """(N, 3) positions of a video's tokens."""
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij"), -1).flatten(0, 2)


def _from_ids(part: Any, named: Named, plan: Plan, tau: float) -> Any:
    return rotary(named["ids"], part.axes_dim, part.theta, plan, tau)


def _hidream(part: Any, named: Named, plan: Plan, tau: float) -> Any:
    return turns(*_angles(named["ids"], part.axes_dim, part.theta, plan, tau)).unsqueeze(2)


def _qwen(part: Any, named: Named, plan: Plan, tau: float) -> Any:
    """Rows and columns are counted from the picture's middle; text goes on beyond its corner, on all axes."""
    shapes = named["video_fhw"]
    shapes = shapes[0] if isinstance(shapes, list) else shapes
    shapes, device = shapes if isinstance(shapes, list) else [shapes], named.get("device")
    ids, last = [], 0
    for k, (frames, height, width) in enumerate(shapes):
        sides = [(-(n - n // 2), n // 2) if part.scale_rope else (0, n) for n in (height, width)]
        last = max(last, *(end for _, end in sides))
        ids.append(_grid(*(torch.arange(a, b, device=device) for a, b in ((k, k + frames), *sides))))
    text = last + torch.arange(int(named["max_txt_seq_len"]), device=device)[:, None].expand(-1, 3)
    turned = []
    for positions in (torch.cat(ids), text):
        angles, factor = _angles(positions, part.axes_dim, part.theta, plan, tau)
        turned.append(torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64))
    return tuple(turned)


def _video(part: Any, named: Named) -> tuple[torch.Tensor, list[int]]:
    """Positions of a video's tokens, and the axes' widths."""
    x = named["hidden_states"]
    counts = [side // patch for side, patch in zip(x.shape[-3:], part.patch_size, strict=True)]
    ids = _grid(*(torch.arange(n, device=x.device, dtype=torch.float32) for n in counts))
    return ids, [part.t_dim, part.h_dim, part.w_dim] if hasattr(part, "t_dim") else [part.dim_t, part.dim_h, part.dim_w]


def _wan(part: Any, named: Named, plan: Plan, tau: float) -> Any:
    ids, dims = _video(part, named)
    cosines, sines = rotary(ids, dims, _THETA, plan, tau)
    return cosines[None, :, None], sines[None, :, None]


def _cosmos(part: Any, named: Named, plan: Plan, tau: float) -> Any:
    ids, dims = _video(part, named)
    if named.get("fps") is not None:
        ids[:, 0] *= part.base_fps / named["fps"]
    thetas = [_THETA * factor for factor in (part.t_ntk_factor, part.h_ntk_factor, part.w_ntk_factor)]
    angles, factor = _angles(ids, dims, thetas, plan, tau)
    angles = torch.cat([angles, angles], -1)
    return (factor * angles.cos()).float(), (factor * angles.sin()).float()


_READERS: dict[str, Callable[[Any, Named, Plan, float], Any]] = {
    "FluxPosEmbed": _from_ids, "Flux2PosEmbed": _from_ids, "Krea2RotaryPosEmbed": _from_ids, "QwenEmbedRope": _qwen,
    "WanRotaryPosEmbed": _wan, "CosmosRotaryPosEmbed": _cosmos, "HiDreamImageEmbedND": _hidream,
}  # fmt: skip
_TABLED = {"Lumina2RotaryPosEmbed": "axes_dim", "RopeEmbedder": "axes_dims"}
"""Embeddings that look whole positions up in a table for each axis, and where they say its widths."""


def _tables(part: Any, plan: Plan, tau: float) -> list[torch.Tensor]:
    dims = getattr(part, _TABLED[type(part).__name__])
    scaled, factor = frequencies(dims, (part.theta,) * len(dims), plan.positions, plan.scales, plan.train, tau)
    angles = [torch.outer(torch.arange(n).double(), f) for n, f in zip(part.axes_lens, scaled, strict=True)]
    kind = torch.complex64 if part.freqs_cis is None else part.freqs_cis[0].dtype
    return [torch.polar(torch.full_like(a, factor), a).to(kind) for a in angles]


# --- putting it in --------------------------------------------------------------------------------------------------
class RotaryPositions(AbstractContextManager):
    """A plan's rotary mode on a backbone of diffusers, from construction until :meth:`close`.

    Weights and the embedding's own tables are never written to.

    Raises:
        VitrineError: in a forward whose rows are at different noise levels, under a mode that follows the timestep.
    """

    def __init__(self, backbone: nn.Module, plan: Plan) -> None:
        path, part = rotary_part(backbone)
        self.plan, self.tau, self._undo = plan, 1.0, list[Callable[[], None]]()
        if type(part).__name__ in _TABLED:
            part = self._tabled(backbone, path, part)
        else:
            self._undo.append(part.register_forward_hook(self._recompute, with_kwargs=True).remove)
        if plan.positions.endswith(DYNAMIC):

            def follow(net: nn.Module, args: tuple, kwargs: Named) -> None:
                self.tau = _noise_share(net, args, kwargs)
                if type(part).__name__ in _TABLED:
                    part.freqs_cis = _tables(part, plan, self.tau)

            self._undo.append(backbone.register_forward_pre_hook(follow, with_kwargs=True).remove)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it out; harmless twice."""
        while self._undo:
            self._undo.pop()()

    def _recompute(self, part: Any, args: tuple, kwargs: Named, output: Any) -> Any:
        return _READERS[type(part).__name__](part, _named(part, args, kwargs), self.plan, self.tau)

    def _tabled(self, backbone: nn.Module, path: str, old: Any) -> Any:
        """A copy of the embedding with tables of its own in its place; the old one is put back as it was."""
        new, name = copy.copy(old), path or "rope_embedder"
        new.freqs_cis = _tables(old, self.plan, 1.0)
        parent, _, name = name.rpartition(".")
        owner = backbone.get_submodule(parent)
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))
        return new


def _named(module: nn.Module, args: tuple, kwargs: Named) -> Named:
    """A forward's arguments by the names of its parameters."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def _noise_share(net: nn.Module, args: tuple, kwargs: Named) -> float:
    """tau of a forward, 1 .. 0, from what the network is told."""
    named, kind = _named(net, args, kwargs), type(net).__name__
    timesteps = next(named[n] for n in ("timestep", "timesteps", "t") if named.get(n) is not None)
    t = torch.as_tensor(timesteps, dtype=torch.float64, device="cpu").reshape(-1)
    if not bool((t == t[0]).all()):
        raise refuse("timesteps", t.tolist(), "one for all rows", "rows at one noise level, or a mode without _dynamic")
    share = float(t[0])
    return 1 - share if kind in _RISING else share / 1000 if kind in _THOUSANDS else share
