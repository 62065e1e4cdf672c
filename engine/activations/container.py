"""The result of a tap: a mapping from address to activation, with how it was made, that saves and loads itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import refuse
from ..files import check_tensors, named, open_artefact, save_artefact
from ..hooks import Activation

KIND = "vitrine.activations"
VERSION = 1
_VARIANCE = "variance/"


def vitrine_version() -> str:
    """The installed version, or "0" when the pack runs from a bare folder."""
    try:
        return metadata.version("vitrine")
    except metadata.PackageNotFoundError:
        return "0"


@dataclass(frozen=True)
class TapInfo:
    """How activations were made.

    Args:
        timestep: the network's own timestep; sigma: its noise level (k-diffusion's, or the flow time).
        seeds: averaged over; prompts: one for each row, or one for all; model: an id to print.
        step: the sampling step they were recorded at, None for a tap of a given picture.
        extra: anything JSON can hold.
    """

    timestep: float | None = None
    sigma: float | None = None
    seeds: tuple[int, ...] = ()
    prompts: tuple[str, ...] = ()
    model: str = ""
    step: int | None = None
    vitrine: str = field(default_factory=vitrine_version)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "seeds": list(self.seeds), "prompts": list(self.prompts), "extra": dict(self.extra)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TapInfo:
        """Rebuild; keys of later versions are ignored, missing ones take their defaults.

        Raises:
            VitrineError: seeds that are not integers, prompts that are not texts, or an extra that is no table.
        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        for name, kind in (("seeds", int), ("prompts", str)):
            values[name] = tuple(values.get(name, ()))
            if isinstance(data.get(name), str) or not all(isinstance(v, kind) for v in values[name]):
                raise refuse(f"tap info {name}", data[name], f"a list of {kind.__name__}", "write the file again")
        if not isinstance(values.get("extra", {}), Mapping):
            raise refuse("tap info extra", values["extra"], "a table", "write the file again")
        return cls(**values)


class Activations(Mapping[str, Activation]):
    """Address -> :class:`Activation`, in the order of execution.

    Tensors are (B, C, h, w) with a grid, (B, N, C) for text tokens, (B, heads, Q, K) for attention maps.
    ``variance`` holds the variance over seeds, same shapes, when it was asked for.
    """

    def __init__(
        self,
        items: Mapping[str, Activation],
        info: TapInfo | None = None,
        variance: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._items = dict(items)
        self.info = info or TapInfo()
        self.variance = dict(variance or {})

    def __getitem__(self, address: str) -> Activation:
        if address not in self._items:
            import difflib

            near = difflib.get_close_matches(str(address), self._items, n=3) or list(self._items)
            raise KeyError(f"{address} was not tapped; this result holds {', '.join(near)}")
        return self._items[address]

    def __contains__(self, address: object) -> bool:
        return address in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        places = ", ".join(f"{a}: {tuple(v.tensor.shape)}" for a, v in self._items.items())
        return f"Activations(t={self.info.timestep}, {places})"

    @property
    def rows(self) -> int:
        """Pictures in the batch."""
        return next(iter(self._items.values())).tensor.shape[0] if self._items else 0

    def select(self, patterns: str | Sequence[str]) -> Activations:
        """The part whose addresses match any of the globs.

        Raises:
            VitrineError: a pattern matches nothing.
        """
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in patterns:
            if not fnmatch.filter(self._items, pattern):
                raise refuse("address", pattern, ", ".join(self._items) or "nothing was tapped", "tap it first")
        keep = [a for a in self._items if any(fnmatch.fnmatchcase(a, p) for p in patterns)]
        spread = {a: self.variance[a] for a in keep if a in self.variance}
        return Activations({a: self._items[a] for a in keep}, self.info, spread)

    def row(self, index: int) -> Activations:
        """One picture's activations, batch size 1. Prompts follow when there is one for each row."""
        part = slice(index, index + 1) if index != -1 else slice(index, None)
        if not -self.rows <= index < self.rows:
            raise refuse("row", index, f"0 <= row < {self.rows}", "this many pictures were tapped")
        items = {a: replace(v, tensor=v.tensor[part]) for a, v in self._items.items()}
        several = len(self.info.prompts) == self.rows
        info = replace(self.info, prompts=self.info.prompts[part]) if several else self.info
        return Activations(items, info, {a: v[part] for a, v in self.variance.items()})

    def to(self, target: torch.device | torch.dtype | str) -> Activations:
        """Every tensor on another device or in another dtype."""
        items = {a: replace(v, tensor=v.tensor.to(target)) for a, v in self._items.items()}
        return Activations(items, self.info, {a: v.to(target) for a, v in self.variance.items()})

    def concat(self, size: tuple[int, int] | None = None, mode: str = "bilinear") -> torch.Tensor:
        """All spatial activations as one (B, sum of C, H, W) map, in execution order, at ``size`` or the widest grid.

        The aggregation of GDF's correspondence (128 x 128) and label-scarce (256 x 256) heads, without normalisation.
        """
        maps = [v.tensor for v in self._items.values() if v.grid is not None and v.tensor.ndim == 4]
        if not maps:
            raise refuse("activations", list(self._items), "at least one place with a grid", "tap a spatial address")
        size = size or max(((m.shape[-2], m.shape[-1]) for m in maps), key=lambda s: s[0] * s[1])
        smooth = {} if mode == "nearest" else {"align_corners": False}
        return torch.cat([F.interpolate(m.float(), size=size, mode=mode, **smooth) for m in maps], dim=1)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all; its header has addresses, grids, how they were made."""
        return save_artefact(path, self.tensors(), KIND, VERSION, self.header())

    @classmethod
    def load(cls, path: str | Path) -> Activations:
        """Read what :meth:`save` wrote.

        Raises:
            VitrineError: missing, truncated or foreign file, another format version, or a header that does not fit.
        """
        handle, header = open_artefact(path, KIND, VERSION)
        with handle as opened:
            return cls.from_tensors(opened, header, source=str(path))

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Flat names -> tensors, as stored in a file."""
        named = {f"{prefix}{a}": v.tensor for a, v in self._items.items()}
        return {**named, **{f"{prefix}{_VARIANCE}{a}": v for a, v in self.variance.items()}}

    def header(self) -> dict[str, Any]:
        """What a file's JSON header says about these activations."""
        grids = {a: None if v.grid is None else list(v.grid) for a, v in self._items.items()}
        return {"grids": grids, "variance": list(self.variance), "info": self.info.to_dict()}

    @classmethod
    def from_tensors(cls, opened: Any, header: Mapping[str, Any], prefix: str = "", source: str = "") -> Activations:
        """Rebuild from an open safetensors handle and a header as :meth:`header` gives."""
        with named(source, "file", "a header that fits its tensors", "the file is damaged; write it again"):
            grids = {a: None if g is None else (int(g[0]), int(g[1])) for a, g in header["grids"].items()}
            items = {a: Activation(a, opened.get_tensor(f"{prefix}{a}"), g) for a, g in grids.items()}
            variance = {a: opened.get_tensor(f"{prefix}{_VARIANCE}{a}") for a in header["variance"]}
            _check(items, variance)
            return cls(items, TapInfo.from_dict(header["info"]), variance)


def _check(items: Mapping[str, Activation], variance: Mapping[str, torch.Tensor]) -> None:
    """What was read is finite, of one batch, and of the shapes its grids say."""
    check_tensors({a: v.tensor for a, v in items.items()})
    check_tensors({_VARIANCE + a: v for a, v in variance.items()})
    for address, found in items.items():
        shape = tuple(found.tensor.shape)
        spread = variance.get(address, found.tensor).shape
        fits = len(shape) in (3, 4) and 0 not in shape and (found.grid is None or shape[2:] == found.grid)
        if not fits or tuple(spread) != shape:
            raise ValueError(f"{address} has shape {shape}, variance {tuple(spread)}, grid {found.grid}")
    if len({len(v.tensor) for v in items.values()}) > 1 or set(variance) - set(items):
        raise ValueError("places of different batches")
