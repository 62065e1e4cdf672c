"""The result of a tap: site name -> activation with its settings, saved as safetensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..diffusion.schedule import append_dims
from ..errors import refuse
from ..io.files import check_tensors, named, open_artefact, save_artefact
from ..io.number_checks import LARGEST_SIDE, all_finite, integer
from ..io.packages import version
from ..settings.config import Config
from ..settings.one_line import one_line
from ..tracing.hooks import Activation

KIND = "vitrine.activations"
VERSION = 1
_VARIANCE = "variance/"


@one_line
@dataclass(frozen=True)
class TapInfo(Config):
    """How activations were computed.

    Args:
        timestep: the network's own timestep.
        sigma: the noise level there (k-diffusion's sigma, or the flow time).
        seeds: of the noise samples that were averaged.
        prompts: one per image, or one for all.
        model: a display name.
        step: the sampling step of the recording, None for a tap of an image.
        vitrine: the version of this pack.
        extra: a JSON object.
    """

    timestep: float | None = None
    sigma: float | None = None
    seeds: tuple[int, ...] = ()
    prompts: tuple[str, ...] = ()
    model: str = ""
    step: int | None = None
    vitrine: str = field(default_factory=version)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("seeds", int), ("prompts", str)):
            entries = getattr(self, name)
            if isinstance(entries, str) or not all(isinstance(entry, kind) for entry in entries):
                raise refuse(f"tap info {name}", entries, f"a list of {kind.__name__}", "write the file again")
            object.__setattr__(self, name, tuple(entries))
        if not isinstance(self.extra, Mapping):
            raise refuse("tap info extra", self.extra, "a table", "write the file again")
        object.__setattr__(self, "extra", dict(self.extra))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TapInfo:
        """The inverse of ``to_dict``; settings of later versions are ignored, missing ones take their defaults."""
        return super().from_dict({name: value for name, value in values.items() if name in cls.__dataclass_fields__})


class Activations(Mapping[str, Activation]):
    """Site name -> :class:`Activation`, in execution order.

    Tensors are (B, C, h, w) with a grid, (B, N, C) for text tokens, (B, heads, Q, K) for attention maps.
    ``variance`` has the variance over seeds in the same shapes, if ``TapConfig.variance`` is on.
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
            raise KeyError(f"{address} was not tapped; this result has {', '.join(near)}")
        return self._items[address]

    def __contains__(self, address: object) -> bool:
        return address in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        sites = ", ".join(f"{a}: {tuple(v.tensor.shape)}" for a, v in self._items.items())
        return f"Activations(t={self.info.timestep}, {sites})"

    @property
    def rows(self) -> int:
        """Number of images in the batch."""
        return next(iter(self._items.values())).tensor.shape[0] if self._items else 0

    def select(self, patterns: str | Sequence[str]) -> Activations:
        """The activations whose site names match any of the globs."""
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        chosen: dict[str, None] = {}
        for pattern in patterns:
            matched = [pattern] if pattern in self._items else fnmatch.filter(self._items, pattern)
            if not matched:
                raise refuse("address", pattern, ", ".join(self._items) or "nothing was tapped", "tap it first")
            chosen |= dict.fromkeys(matched)
        chosen = {a: None for a in self._items if a in chosen}
        variance = {a: self.variance[a] for a in chosen if a in self.variance}
        return Activations({a: self._items[a] for a in chosen}, self.info, variance)

    def row(self, index: int) -> Activations:
        """The activations of one image, batch size 1, with its prompt if there is one per image."""
        only = slice(index, index + 1) if index != -1 else slice(index, None)
        if not -self.rows <= index < self.rows:
            raise refuse("row", index, f"0 to {self.rows - 1}", "that many pictures were tapped")
        items = {a: replace(v, tensor=v.tensor[only]) for a, v in self._items.items()}
        one_each = len(self.info.prompts) == self.rows
        info = replace(self.info, prompts=self.info.prompts[only]) if one_each else self.info
        return Activations(items, info, {a: v[only] for a, v in self.variance.items()})

    def take(self, rows: Sequence[int]) -> Activations:
        """Images by index, without their variance; consecutive ones as views."""
        ordered = len(rows) > 0 and list(rows) == list(range(rows[0], rows[0] + len(rows)))
        index = slice(rows[0], rows[0] + len(rows)) if ordered else list(rows)
        items = {a: replace(v, tensor=v.tensor[index]) for a, v in self._items.items()}
        return Activations(items, replace(self.info, prompts=()))

    def to(self, target: torch.device | torch.dtype | str) -> Activations:
        """Every tensor on another device or in another dtype."""
        items = {a: replace(v, tensor=v.tensor.to(target)) for a, v in self._items.items()}
        return Activations(items, self.info, {a: v.to(target) for a, v in self.variance.items()})

    def concat(self, size: tuple[int, int] | None = None, mode: str = "bilinear") -> torch.Tensor:
        """All spatial activations as one (B, sum of C, H, W) map, in execution order, at ``size`` or the largest grid.

        GDF's correspondence (128 x 128) and label-scarce (256 x 256) heads concatenate sites like this, without
        normalisation.
        """
        maps = [v.tensor for v in self._items.values() if v.grid is not None and v.tensor.ndim == 4]
        if not maps:
            raise refuse("activations", list(self._items), "at least one layer with a grid", "tap a spatial layer")
        size = size or max(((m.shape[-2], m.shape[-1]) for m in maps), key=lambda s: s[0] * s[1])
        smooth = {} if mode == "nearest" else {"align_corners": False}
        return torch.cat([F.interpolate(m.float(), size=size, mode=mode, **smooth) for m in maps], dim=1)

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file atomically; its header has site names, grids and :attr:`info`."""

        def check(tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
            self.from_tensors(tensors.__getitem__, header, source=str(path))

        return save_artefact(path, self.tensors(), KIND, VERSION, self.header(), check)

    @classmethod
    def load(cls, path: str | Path) -> Activations:
        """Read what :meth:`save` wrote."""
        handle, header = open_artefact(path, KIND, VERSION)
        with handle as opened:
            return cls.from_tensors(opened.get_tensor, header, source=str(path))

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Flat names -> tensors, as stored in a file."""
        means = {f"{prefix}{a}": v.tensor for a, v in self._items.items()}
        return {**means, **{f"{prefix}{_VARIANCE}{a}": v for a, v in self.variance.items()}}

    def header(self) -> dict[str, Any]:
        """The JSON header of a file with these activations."""
        grids = {a: None if v.grid is None else list(v.grid) for a, v in self._items.items()}
        return {"grids": grids, "variance": list(self.variance), "info": self.info.to_dict()}

    @classmethod
    def from_tensors(
        cls,
        tensor_of: Callable[[str], torch.Tensor],
        header: Mapping[str, Any],
        prefix: str = "",
        source: str = "",
        only: Sequence[str] | None = None,
    ) -> Activations:
        """Rebuild from tensors by name and a header as :meth:`header` gives it; ``only`` selects sites."""
        with named(source, "file", "a header that fits its tensors", "the file is damaged; write it again"):
            grids = {a: None if g is None else _grid(g) for a, g in header["grids"].items()}
            grids = grids if only is None else {a: grids[a] for a in only}
            items = {a: Activation(a, tensor_of(f"{prefix}{a}"), g) for a, g in grids.items()}
            variance = {a: tensor_of(f"{prefix}{_VARIANCE}{a}") for a in header["variance"] if a in grids}
            _check(items, variance)
            return cls(items, TapInfo.from_dict(header["info"]), variance)


def _grid(sides: Sequence[object]) -> tuple[int, int]:
    height, width = (integer(side, "grid", 1, LARGEST_SIDE) for side in sides)
    return height, width


def _check(items: Mapping[str, Activation], variance: Mapping[str, torch.Tensor]) -> None:
    """Raises if tensors are not finite, not of one batch, or their shapes do not match their grids."""
    check_tensors({a: v.tensor for a, v in items.items()})
    check_tensors({_VARIANCE + a: v for a, v in variance.items()})
    for address, activation in items.items():
        shape = tuple(activation.tensor.shape)
        of_variance = tuple(variance.get(address, activation.tensor).shape)
        fits = len(shape) in (3, 4) and 0 not in shape and (activation.grid is None or shape[2:] == activation.grid)
        if not fits or of_variance != shape:
            raise ValueError(f"{address} has shape {shape}, variance {of_variance}, grid {activation.grid}")
    if len({len(v.tensor) for v in items.values()}) > 1 or set(variance) - set(items):
        raise ValueError("sites of different batches")


FLOAT16_MAX = 65504.0


@dataclass
class RunningMoments:
    """Welford's mean and sum of squared deviations, float32, of each image at one site.

    Attributes:
        mean: (pictures, ...) in the memory order of the activations.
        deviations: the same, or None without variance.
        counts: samples of each picture.
    """

    address: str
    grid: tuple[int, int] | None
    mean: torch.Tensor
    deviations: torch.Tensor | None
    counts: list[int]

    @classmethod
    def like(cls, activation: Activation, pictures: int, variance: bool) -> RunningMoments:
        """Empty statistics, on the activation's device."""
        tensor = activation.tensor
        turned = not tensor.is_contiguous()  # tokens: channels come last in memory
        shape = tensor.movedim(1, -1).shape if turned else tensor.shape
        mean = torch.zeros(pictures, *shape[1:], device=tensor.device)
        mean = mean.movedim(-1, 1) if turned else mean
        deviations = torch.zeros_like(mean) if variance else None
        return cls(activation.address, activation.grid, mean, deviations, [0] * pictures)

    @classmethod
    def of_one_each(cls, activation: Activation, variance: bool) -> RunningMoments:
        """Of one sample of each picture, which is not copied: nothing else may use the activation."""
        mean = activation.tensor.float()
        mean = mean.clone() if 0 in mean.stride() else mean  # one row for all pictures
        return cls(
            activation.address, activation.grid, mean, torch.zeros_like(mean) if variance else None, [1] * len(mean)
        )

    def add(self, picture: int, value: torch.Tensor) -> None:
        """Adds one sample of one image."""
        self.counts[picture] += 1
        mean = self.mean[picture]
        if self.counts[picture] == 1:
            mean.copy_(value)
            return
        # Welford 1962: m += (x - m) / n, S += (x - m_old)(x - m_new).
        difference = value.float() - mean
        mean += difference / self.counts[picture]
        if self.deviations is not None:
            self.deviations[picture] += difference * (value.float() - mean)

    def variance(self) -> torch.Tensor | None:
        """Unbiased variance over the samples, or None if it is off."""
        if self.deviations is None:
            return None
        counts = torch.tensor(self.counts, device=self.mean.device, dtype=torch.float32)
        return self.deviations / append_dims((counts - 1).clamp_min(1), self.mean.ndim)


def store(tensor: torch.Tensor, dtype: torch.dtype, address: str) -> torch.Tensor:
    """Cast for storage and move to the CPU."""
    stored = tensor.to(dtype).cpu()  # checked on the CPU: the transfer is the only device synchronisation
    if all_finite(stored):
        return stored
    if not all_finite(tensor):
        remedy = "the network overflowed; run it in float32 or bfloat16, and check its weights"
        raise refuse(f"activation {address}", "NaN or infinite values", "finite values", remedy)
    largest = f"{tensor.abs().amax().item():.3g}"
    raise refuse(f"activation {address}", largest, f"up to {FLOAT16_MAX:.0f} in float16", "use dtype='float32'")
