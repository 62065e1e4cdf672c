"""Damage in a LoRA's tensors, and the distribution of its weight update; needs no model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import VitrineError
from ...io.files import named
from ...io.lora_layer import LoraLayer
from .adapter_factors import factors_of
from .lora_files import LoraFile

LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3.3e38, torch.float32: 3.4e38}
"""Largest finite numbers; 8-bit floats end at 448 (e4m3) and 57344 (e5m2)."""
_KINDS = (
    ("cross-attention: query", r"attn2\.to_q$"), ("cross-attention: key", r"attn2\.to_k$"),
    ("cross-attention: value", r"attn2\.to_v$"), ("cross-attention: output", r"attn2\.to_out"),
    ("self-attention: query", r"attn1\.to_q$"), ("self-attention: key", r"attn1\.to_k$"),
    ("self-attention: value", r"attn1\.to_v$"), ("self-attention: output", r"attn1\.to_out"),
    ("text's attention", r"add_[qkv]_proj$|to_add_out|txt_attn|context_block\.attn"),
    ("feed-forward", r"\.ff|mlp|feed_forward|\.net\.|linear[12]$"), ("projection", r"proj_(in|out)$"),
    ("modulation and time", r"time|norm|mod|embed"), ("resnet convolution", r"resnets|samplers|conv"),
    ("attention", r"attn|attention|to_[qkv]$|to_out|qkv|\.proj$"),
)  # fmt: skip
"""Kind of a layer -> pattern of its path; the first match counts."""
_BLOCK = re.compile(
    r"^(down_blocks\.\d+|up_blocks\.\d+|mid_block|[a-z_]*blocks?\.\d+|layers\.\d+|[a-z_]+)", re.IGNORECASE
)


@dataclass(frozen=True)
class LayerHealth:
    """The state of one layer.

    Attributes:
        path: in diffusers' naming.
        squared: |dW|^2, the squared norm of its weight update; NaN if it is broken.
        rank: of its factors.
        used: effective rank, the participation ratio of the squared singular values of its update (1 .. rank).
        problem: ``NaN or infinite``, ``at the end of its number format``, ``changes nothing``; empty without a problem.
    """

    path: str
    squared: float
    rank: int
    used: float
    problem: str = ""

    @property
    def kind(self) -> str:
        """The layer's kind, in words."""
        return next((kind for kind, pattern in _KINDS if re.search(pattern, self.path)), "other")

    @property
    def block(self) -> str:
        """The block that it is in, such as ``down_blocks.1``."""
        match = _BLOCK.match(self.path)
        return match[1] if match else self.path


@dataclass(frozen=True)
class LoraHealth:
    """The state of all layers of a file."""

    layers: tuple[LayerHealth, ...]

    def broken(self, problem: str) -> list[str]:
        """Paths of the layers with the given problem."""
        return [layer.path for layer in self.layers if layer.problem == problem]

    @property
    def total(self) -> float:
        """|dW|^2 over the layers without a problem."""
        return sum(layer.squared for layer in self.layers if layer.squared == layer.squared)

    def fractions(self, by: str) -> dict[str, float]:
        """Fraction of |dW|^2 by ``kind`` or ``block``, largest first for kinds, in the order of the file for blocks."""
        sums: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            if layer.squared == layer.squared:
                sums[getattr(layer, by)] += layer.squared
        total = max(self.total, 1e-300)
        fractions = {name: value / total for name, value in sums.items()}
        return dict(sorted(fractions.items(), key=lambda pair: -pair[1])) if by == "kind" else fractions

    @property
    def used(self) -> float:
        """Mean effective rank, weighted by each layer's fraction of the update."""
        sound = [layer for layer in self.layers if layer.squared == layer.squared and layer.squared]
        return sum(layer.used * layer.squared for layer in sound) / max(sum(y.squared for y in sound), 1e-300)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        problems = {layer.problem for layer in self.layers} - {""}
        norms = {layer.path: round(layer.squared**0.5, 6) for layer in self.layers if layer.squared == layer.squared}
        return {
            "broken": {problem: self.broken(problem) for problem in sorted(problems)}, "norm": self.total**0.5,
            "effective_rank": round(self.used, 2), "by_kind": _rounded(self.fractions("kind")),
            "by_block": _rounded(self.fractions("block")), "norm_by_layer": norms,
        }  # fmt: skip


def _rounded(fractions: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in fractions.items()}


def health_of(file: LoraFile) -> LoraHealth:
    """The state of every layer of a file, one in memory at a time."""
    from safetensors import safe_open

    layers = []
    errors = named(file.path, "LoRA file", "a whole safetensors file", "download it again")
    with errors, safe_open(str(file.path), "pt") as opened:
        for path, entry in file.entries.items():
            tensors = {role: opened.get_tensor(key) for role, key in entry.keys if role != "alpha"}
            rank = entry.down[0]
            problem = _problem(tensors)
            if problem:
                layers.append(LayerHealth(path, torch.nan, rank, 0.0, problem))
                continue
            weight = file.base[path].cpu() if entry.decomposed and file.base is not None else None
            down, up = factors_of(entry, tensors, weight)
            layer = LoraLayer(down, up, float(rank) if entry.alpha is None else entry.alpha)
            squared, used = _squared_and_used(layer)
            layers.append(LayerHealth(path, squared, rank, used, "" if squared else "changes nothing"))
    return LoraHealth(tuple(layers))


def _problem(tensors: Mapping[str, torch.Tensor]) -> str:
    for tensor in tensors.values():
        values = tensor if tensor.dtype in LARGEST else tensor.float()
        largest = LARGEST.get(tensor.dtype, 448.0 if "e4m3" in str(tensor.dtype) else 57344.0)
        peak = float(values.float().abs().max()) if values.numel() else 0.0
        if peak != peak or peak == float("inf"):
            return "NaN or infinite"
        if peak >= largest:
            return "at the end of its number format"
    return ""


def _squared_and_used(layer: LoraLayer) -> tuple[float, float]:
    """|dW|^2, and the participation ratio of the squared singular values, from the smaller Gram matrix."""
    down, up = layer.down.flatten(1).double(), layer.up.flatten(1).double() * layer.scale
    if len(down) <= min(len(up), down.shape[1]):
        # the squared singular values of U D are the eigenvalues of (U^T U)(D D^T)
        product = (up.T @ up) @ (down @ down.T)
    else:
        change = up @ down
        product = change @ change.T if len(change) <= change.shape[1] else change.T @ change
    trace, square = float(product.trace()), float((product * product.T).sum())
    if not trace > 0:
        return 0.0, 0.0
    return trace, trace * trace / max(square, 1e-300)


def readable_health(file: LoraFile) -> tuple[LoraHealth | None, str]:
    """(:func:`health_of`, "") or (None, reason)."""
    try:
        return health_of(file), ""
    except VitrineError as error:
        return None, str(error)
