"""The controls of a model, their order and scale (Berrada et al. 2024, 2.1 and 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import refuse
from ..settings.config import Config

GROUPS = ("high", "low")
KINDS = ("scalar", "flag", "log_scalar")


@dataclass(frozen=True)
class ControlField(Config):
    """One control.

    Attributes:
        name: its key in mappings of values.
        group: ``high`` changes composition (flip, crop, aspect) and always has weight 1; ``low`` changes detail (size)
            and has weight gamma.
        kind: ``scalar``, ``flag`` (0 or 1), ``log_scalar`` (a ratio above 0, embedded as its natural logarithm).
        scale: factor on the value before the sinusoid, whose shortest period is 2 pi.
        ref: the neutral value, in the value's unit.
        least, most: accepted range, in the value's unit.
    """

    name: str
    group: str
    kind: str = "scalar"
    scale: float = 1.0
    ref: float = 0.0
    least: float = -math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        if not self.name or self.group not in GROUPS or self.kind not in KINDS:
            raise refuse("field", (self.name, self.group, self.kind), f"a name, {GROUPS}, {KINDS}", "see ControlField")
        if not (math.isfinite(self.scale) and self.scale != 0):
            raise refuse(f"scale of {self.name}", self.scale, "a finite number, not 0", "1.0 for pixels")
        self.check(torch.tensor([self.ref], dtype=torch.float64))

    def check(self, values: torch.Tensor) -> None:
        """Checks values of any shape."""
        good = torch.isfinite(values) & (values >= self.least) & (values <= self.most)
        accepted = f"{self.least:g} to {self.most:g}"
        if self.kind == "flag":
            good, accepted = good & ((values == 0) | (values == 1)), "0 or 1"
        elif self.kind == "log_scalar":
            good, accepted = good & (values > 0), f"a ratio above 0, {accepted}"
        if not bool(good.all()):
            raise refuse(self.name, values[~good][:4].tolist(), accepted, f"{self.ref:g} is neutral")

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values in their unit -> inputs of the sinusoid, the same shape."""
        return (values.log() if self.kind == "log_scalar" else values) * self.scale


def _default_fields() -> tuple[ControlField, ...]:
    return (
        ControlField("flip", "high", "flag", 1000.0, 0.0, 0.0, 1.0),
        ControlField("crop_top", "high", "scalar", 1000.0, 0.0, 0.0, 1.0),
        ControlField("crop_left", "high", "scalar", 1000.0, 0.0, 0.0, 1.0),
        ControlField("aspect", "high", "log_scalar", 1000.0, 1.0, 1 / 16, 16.0),
        ControlField("height", "low", "scalar", 1.0, 256.0, 16.0, 16384.0),
        ControlField("width", "low", "scalar", 1.0, 256.0, 16.0, 16384.0),
    )


@dataclass(frozen=True)
class ControlSpec(Config):
    """An ordered list of controls, which are the columns of a (B, F) table of values.

    The default: flip, crop_top and crop_left (as fractions of height and width), aspect (width / height) in the
    high group; height and width (pixels) in the low one.
    """

    fields: tuple[ControlField, ...] = field(default_factory=_default_fields)

    def __post_init__(self) -> None:
        if not self.fields or len(set(self.names)) != len(self.fields):
            raise refuse("fields", self.names, "one or more, each name once", "rename or remove")

    @property
    def names(self) -> tuple[str, ...]:
        """Field names in column order."""
        return tuple(f.name for f in self.fields)

    def columns(self, group: str) -> list[int]:
        """Column indices of one group."""
        return [i for i, f in enumerate(self.fields) if f.group == group]

    def reference(self) -> dict[str, float]:
        """The neutral value of each control."""
        return {f.name: f.ref for f in self.fields}

    def rows(self, values: Mapping[str, float | Sequence[float] | torch.Tensor]) -> torch.Tensor:
        """Named values, each a number or a list of B -> (B, F) float64 in their units, checked."""
        missing, unknown = set(self.names) - set(values), set(values) - set(self.names)
        if missing or unknown:
            names = f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            raise refuse("controls", names, self.names, "ControlSpec.reference() gives neutral values")
        columns = [torch.as_tensor(values[n], dtype=torch.float64, device="cpu").reshape(-1) for n in self.names]
        lengths = {len(c) for c in columns} - {1}
        if len(lengths) > 1:
            raise refuse("controls", sorted(lengths), "one length", "give a number or one value for each picture")
        count = lengths.pop() if lengths else 1
        return self.checked(torch.stack([c.expand(count) for c in columns], 1))

    def checked(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the (B, F) table if every value is in range."""
        if values.ndim != 2 or values.shape[1] != len(self.fields):
            accepted = f"(B, {len(self.fields)})"
            raise refuse("size values", tuple(values.shape), accepted, f"columns are {self.names}")
        for column, control in enumerate(self.fields):
            control.check(values[:, column])
        return values

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """(B, F) in their units -> (B, F) inputs of the sinusoids, in the same dtype."""
        return torch.stack([f.encode(values[:, i]) for i, f in enumerate(self.fields)], 1)
