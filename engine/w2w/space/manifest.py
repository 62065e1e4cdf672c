"""The layout of LoRA factors in a flat weight vector; stored with a space, never derived from modules.

Order: layers by name as strings, and in each layer the down factor (A), then the up factor (B), both row-major. For
rank 1 adapters on the q and v projections of SD1.5 this is the order of the published space (99,648 numbers).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...errors import printable, refuse
from ...io.files import parse_json
from ...io.lora_layer import Lora, LoraLayer
from ...io.number_checks import LARGEST_SIDE, integer
from ...settings.one_line import one_line
from ..loras.layer_names import layer_fits
from ..loras.lora_settings import LARGEST_ALPHA


@dataclass(frozen=True)
class Layer:
    """The position of one layer's factors in a flat vector.

    Attributes:
        path: module path in diffusers' UNet naming, without ``.weight``.
        down, up: shapes of the factors; the rank is ``down[0]``.
        offset: index of the first number of the down factor; the up factor follows it.
        alpha: constant, of every model of the space.
    """

    path: str
    down: tuple[int, ...]
    up: tuple[int, ...]
    offset: int
    alpha: float

    @property
    def rank(self) -> int:
        """r."""
        return self.down[0]

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank

    @property
    def numbers(self) -> int:
        """Number of weights that the two factors change."""
        return self.up[0] * math.prod(self.down[1:])

    @property
    def middle(self) -> int:
        """Index of the first number of the up factor."""
        return self.offset + math.prod(self.down)

    @property
    def end(self) -> int:
        """One past the last number."""
        return self.middle + math.prod(self.up)


@one_line
@dataclass(frozen=True)
class Manifest(Sequence[Layer]):
    """The layers of a flat vector, in order and without gaps."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        expected = 0
        for layer in self.layers:
            for side in (*layer.down, *layer.up):
                integer(side, "side of a layer", 1, LARGEST_SIDE)
            integer(layer.offset, "offset of a layer")
            sound = len(layer.down) > 1 and len(layer.up) > 1
            sound = sound and isinstance(layer.path, str) and printable(layer.path) == layer.path
            sound = sound and isinstance(layer.alpha, (int, float))
            sound = sound and 0 < abs(layer.alpha) <= LARGEST_ALPHA and layer_fits(layer.path, layer.numbers)
            if not sound or layer.offset != expected or layer.up[1] != layer.down[0]:
                shown = f"{layer.path} at {layer.offset}, {layer.down} and {layer.up}"
                raise refuse("manifest", shown, f"offset {expected} and one rank", "rebuild the space")
            expected = layer.end

    @classmethod
    def of(cls, lora: Lora) -> Manifest:
        """The manifest of one LoRA."""
        layers, offset = [], 0
        for path in sorted(lora):
            factors = lora[path]
            layer = Layer(path, tuple(factors.down.shape), tuple(factors.up.shape), offset, float(factors.alpha))
            layers.append(layer)
            offset = layer.end
        return cls(tuple(layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:  # an int gives a Layer, a slice a tuple
        return self.layers[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def size(self) -> int:
        """D, the length of a flat vector."""
        return self.layers[-1].end if self.layers else 0

    def flatten(self, lora: Lora) -> torch.Tensor:
        """A LoRA -> (D,) float32; up factors are scaled if its alpha differs from the manifest's."""
        if set(lora) != {layer.path for layer in self}:
            unmatched = sorted(set(lora) ^ {layer.path for layer in self})[:3]
            raise refuse(
                "LoRA layers", f"{len(lora)}, among others {unmatched}", f"the space's {len(self)}", "use delta mode"
            )
        return torch.cat([factor for layer in self for factor in _flat_factors(layer, lora[layer.path])])

    def unflatten(self, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """(D,) -> path -> (down, up), as views, so that gradients reach ``flat``."""
        if flat.shape != (self.size,):
            raise refuse("flat weights", tuple(flat.shape), (self.size,), "decode one model at a time")
        return {
            layer.path: (
                flat[layer.offset : layer.middle].view(layer.down),
                flat[layer.middle : layer.end].view(layer.up),
            )
            for layer in self
        }

    def lora(self, flat: torch.Tensor) -> dict[str, LoraLayer]:
        """(D,) -> path -> :class:`LoraLayer`."""
        factors = self.unflatten(flat)
        return {layer.path: LoraLayer(*factors[layer.path], layer.alpha) for layer in self}

    def to_json(self) -> str:
        """The manifest as JSON, for a file's header."""
        return json.dumps([asdict(layer) for layer in self])

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of :meth:`to_json`."""
        layers = parse_json(text)
        return cls(tuple(Layer(**(d | {"down": tuple(d["down"]), "up": tuple(d["up"])})) for d in layers))


def _flat_factors(layer: Layer, factors: LoraLayer) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [tuple(f.flatten(1).shape) for f in (factors.down, factors.up)]  # 1 x 1 projections may also be (r, in)
    if shapes != [(side[0], math.prod(side[1:])) for side in (layer.down, layer.up)]:
        shown = f"{layer.path}: {tuple(factors.down.shape)} and {tuple(factors.up.shape)}"
        raise refuse("LoRA shapes", shown, f"{layer.down} and {layer.up}", "use delta mode for mixed ranks")
    up = factors.up.reshape(-1).float()
    return factors.down.reshape(-1).float(), up if factors.alpha == layer.alpha else up * (factors.alpha / layer.alpha)
