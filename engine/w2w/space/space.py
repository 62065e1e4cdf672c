"""A space of models: mean, spread and principal directions of many LoRAs' flat weights, in one safetensors file.

A model is a row of K coefficients beta: theta = mean + scale * (beta @ components) (weights2weights, section 3.1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import refuse
from ...io.files import check_tensors, named, parse_json, parse_table, read_artefact, save_artefact
from ...io.hub import Shared
from ...io.lora_layer import LoraLayer
from ...io.number_checks import integer
from .manifest import Manifest
from .space_checks import (
    MOST_MODELS,
    check_components,
    check_directions,
    check_info,
    check_names,
    check_numbers,
    check_spread,
)

KIND = "vitrine.w2w.space"
VERSION = 1
LINKED_VERSION = 2
"""Marks delta spaces whose factors stay in the LoRA files."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class WeightSpace(Shared):
    """A space in ``factors`` mode: PCA of standardised LoRA factors.

    Attributes:
        manifest: layers with module path, rank, shapes and offsets.
        mean: (D,) float32.
        scale: (D,) float32, the standard deviation of each weight; some are negative in the published files.
        components: (K, D), orthonormal; rows, so that the first m are one contiguous slice.
        singular_values: (K,) of the standardised, centred data; the deviation of coefficient k is S_k / sqrt(N - 1).
        coefficients: (N, M) of the training models, M <= K: the leading ones, since the published files have 1,000 of
            10,000; (0, K) if the file has none.
        count: N, the number of training models.
        names: of the models, in the order of ``coefficients``.
        directions: label -> (K,), of length one standard deviation (see ``directions.py``).
        total_variance: of the standardised data (sum over all of S^2 / (N - 1)), for explained fractions.
        info: provenance, JSON-compatible ("base", "gauge", "source", ...).
    """

    FILE = "space.w2w.safetensors"
    TITLE = "Weight space of LoRAs"
    ABOUT = "Directions of many LoRAs of one base model (weights2weights, arXiv:2406.09413)."
    FOLDER = "vitrine_w2w"

    manifest: Manifest
    mean: torch.Tensor
    scale: torch.Tensor
    components: torch.Tensor
    singular_values: torch.Tensor
    coefficients: torch.Tensor
    count: int
    names: tuple[str, ...] = ()
    directions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    total_variance: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    mode = "factors"

    def __repr__(self) -> str:
        return f"WeightSpace({self.count} models, {len(self.components)} components, {len(self.manifest)} layers)"

    def __post_init__(self) -> None:
        if self.components.ndim != 2:
            raise refuse("space components", tuple(self.components.shape), "(K, D)", "build it again")
        d, (k, width) = self.manifest.size, self.components.shape
        shapes = {"mean": self.mean.shape, "scale": self.scale.shape, "components": (width,)}
        for name, shape in shapes.items():
            if tuple(shape) != (d,):
                raise refuse(
                    f"space {name}", tuple(shape), (d,), "the file does not match its own manifest: build it again"
                )
        shaped = self.singular_values.ndim == 1 and self.coefficients.ndim == 2
        if not shaped or len(self.singular_values) != k or self.coefficients.shape[1] > k or self.count < 2:
            shown = (len(self.singular_values), tuple(self.coefficients.shape), self.count)
            raise refuse("space", shown, f"{k} components of 2 or more models", "build it again")

    @property
    def dimension(self) -> int:
        """K."""
        return len(self.singular_values)

    @property
    def deviations(self) -> torch.Tensor:
        """(K,) standard deviation of each coefficient over the training models, S_k / sqrt(N - 1); 0 if unknown."""
        return self.singular_values / (self.count - 1) ** 0.5

    @property
    def explained(self) -> torch.Tensor:
        """(K,) fraction of the total variance of each component; each standardised weight has variance one."""
        return (self.deviations.double() ** 2 / (self.total_variance or float(self.manifest.size))).float()

    @property
    def inputs(self) -> list[object]:
        """Inputs of its models for a :class:`~vitrine.engine.jobs.run.Run`: all but names and directions."""
        numbers = [self.mean, self.scale, self.components, self.singular_values, self.coefficients, self.count]
        return [self.manifest.to_json(), *numbers]

    @property
    def identity(self) -> str:
        """A short hash of everything that gives coefficients their meaning; identifies the space in saved models."""
        digest = hashlib.sha256(self.manifest.to_json().encode())
        for tensor in (self.mean, self.singular_values):
            digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def decode(self, coefficients: torch.Tensor) -> torch.Tensor:
        """(..., k) -> flat weights (..., D), differentiable; with k < K, of the first k components."""
        k = coefficients.shape[-1]
        if not 0 < k <= self.dimension:
            raise refuse("coefficients", k, f"1 .. {self.dimension}", "use the space that they belong to")
        device = coefficients.device
        mean, scale = self.mean.to(device), self.scale.to(device)
        basis = self.components[:k].to(device, torch.float32)
        # weights2weights, section 3.1 and official unproject(): theta = (beta V^T) * std + mean
        return mean + scale * (coefficients.float() @ basis)

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat weights (..., D) -> (..., K): the nearest point of the space, in standardised weights."""
        mean, scale = self.mean.to(flat.device), self.scale.to(flat.device)
        # weights2weights, official project(): beta = ((theta - mean) / std) V
        return ((flat.float() - mean) / scale) @ self.components.to(flat.device, torch.float32).T

    def unflatten(self, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """(D,) -> layer path -> (down (r, in), up (out, r)); views, so gradients reach ``flat``."""
        return self.manifest.unflatten(flat)

    def flatten(self, lora: Mapping[str, LoraLayer]) -> torch.Tensor:
        """A LoRA with the space's layers and shapes -> (D,)."""
        return self.manifest.flatten(lora)

    def lora(self, coefficients: torch.Tensor) -> dict[str, LoraLayer]:
        """Coefficients (k,) -> the LoRA of that model."""
        return self.manifest.lora(self.decode(coefficients))

    def encode_lora(self, lora: Mapping[str, LoraLayer]) -> torch.Tensor:
        """A LoRA -> (K,)."""
        return self.encode(self.manifest.flatten(lora))

    def first(self, count: int) -> WeightSpace:
        """The space of the first ``count`` components; the space itself if it has no more."""
        check_components(count)

        return (
            self
            if count >= self.dimension
            else replace(
                self,
                components=self.components[:count],
                singular_values=self.singular_values[:count],
                coefficients=self.coefficients[:, :count],
                directions={label: d[:count] for label, d in self.directions.items()},
            )
        )

    def save(self, path: str | Path, dtype: str = "float32") -> Path:
        """Writes one safetensors file atomically; ``dtype`` is that of components and coefficients."""
        if dtype not in DTYPES:
            raise refuse("dtype", dtype, sorted(DTYPES), "float16 halves the file")
        narrow = DTYPES[dtype]
        tensors = {"mean": self.mean.float(), "std": self.scale.float(), "V": self.components.to(narrow)}
        tensors |= {"S": self.singular_values.float(), "proj": self.coefficients.to(narrow)}
        tensors |= {f"dir.{label}": d.float() for label, d in self.directions.items()}
        header: dict[str, Any] = {"mode": self.mode, "manifest": self.manifest.to_json(), "count": self.count}
        header |= {"names": json.dumps(list(self.names)), "total_variance": repr(self.total_variance)}
        header |= {"identity": self.identity, "info": json.dumps(dict(self.info))}
        return save_artefact(path, tensors, KIND, VERSION, header, self._rebuilt)

    @classmethod
    def load(cls, path: str | Path) -> WeightSpace:
        """Reads a file of :meth:`save`; components keep the file's dtype, everything else is float32."""
        tensors, header = read_artefact(path, KIND, VERSION)
        with named(path, "space", "a header that fits its tensors", "build it again"):
            return cls._rebuilt(tensors, header)

    @classmethod
    def _rebuilt(cls, tensors: dict[str, torch.Tensor], header: Mapping[str, Any]) -> WeightSpace:
        check_tensors(tensors)
        check_numbers(tensors)
        if header.get("mode") != cls.mode:
            raise refuse("space", f"mode {header.get('mode')!r}", cls.mode, "load it with load_space")
        directions = {k[4:]: v.float() for k, v in tensors.items() if k.startswith("dir.")}
        singular, rows = tensors["S"].float(), tensors["proj"].float()
        count = integer(header["count"], "models", 2, MOST_MODELS)
        names, variance = check_names(parse_json(header["names"]), len(rows)), float(header["total_variance"])
        info = parse_table(header["info"])
        check_spread(singular, variance, count)
        check_directions(directions, singular)
        check_info(info, len(singular), len(rows))
        if bool((tensors["std"] == 0).any()):
            raise ValueError("a deviation of 0 (std), by which weights are divided")
        if len(rows) > count:
            raise ValueError(f"coefficients of {len(rows)} models, of {count}")
        return cls(
            Manifest.from_json(header["manifest"]), tensors["mean"].float(), tensors["std"].float(), tensors["V"],
            singular, rows, count, names, directions, variance, info,
        )  # fmt: skip
