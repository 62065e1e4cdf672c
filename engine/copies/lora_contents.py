"""What a LoRA's file shows without a model: damage, where its weight update is, and which other LoRAs it is near."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import VitrineError, printable
from ..io.files import named
from ..io.folders import files_in
from ..io.lora_layer import LoraLayer
from ..io.number_checks import all_finite
from ..w2w.building.folder_summary import NUMBERS
from ..w2w.loras.adapter_factors import factors_of
from ..w2w.loras.lora_files import LoraFile, read_header, read_lora
from ..w2w.loras.lora_folders import distinct_names, scan_folder
from ..w2w.loras.near_copies import NEAR, Copy, near_copies, sketch
from ..w2w.space.space_mode import read_or_problem

LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3.3e38, torch.float32: 3.4e38}
"""Largest finite numbers; 8-bit floats end at 448 (e4m3) and 57344 (e5m2)."""
_KINDS = (
    ("cross-attention: query", r"attn2\.to_q$"),
    ("cross-attention: key", r"attn2\.to_k$"),
    ("cross-attention: value", r"attn2\.to_v$"),
    ("cross-attention: output", r"attn2\.to_out"),
    ("self-attention: query", r"attn1\.to_q$"),
    ("self-attention: key", r"attn1\.to_k$"),
    ("self-attention: value", r"attn1\.to_v$"),
    ("self-attention: output", r"attn1\.to_out"),
    ("text's attention", r"add_[qkv]_proj$|to_add_out|txt_attn|context_block\.attn"),
    ("feed-forward", r"\.ff|mlp|feed_forward|\.net\.|linear[12]$"),
    ("projection", r"proj_(in|out)$"),
    ("modulation and time", r"time|norm|mod|embed"),
    ("resnet convolution", r"resnets|samplers|conv"),
    ("attention", r"attn|attention|to_[qkv]$|to_out|qkv|\.proj$"),
)
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
    """The state of all layers of a file.

    Attributes:
        layers: those of the network.
        others_broken: names of the file's other tensors, such as a text encoder's, that are NaN or infinite.
    """

    layers: tuple[LayerHealth, ...]
    others_broken: tuple[str, ...] = ()

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
            "broken": {problem: self.broken(problem) for problem in sorted(problems)},
            "others_broken": list(self.others_broken),
            "norm": self.total**0.5,
            "effective_rank": round(self.used, 2),
            "by_kind": _rounded(self.fractions("kind")),
            "by_block": _rounded(self.fractions("block")),
            "norm_by_layer": norms,
        }


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
        own = {key for entry in file.entries.values() for _, key in entry.keys}
        others = (key for key in opened.keys() if key not in own)  # noqa: SIM118 - it is no mapping
        broken = tuple(printable(key) for key in others if not all_finite(opened.get_tensor(key)))
    return LoraHealth(tuple(layers), broken)


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


# --- neighbours -----------------------------------------------------------------------------------------------------
MOST, LEAST = 4, 0.05
"""Most parts of a merge, and the smallest weight of a part."""
RESIDUAL = 0.2
"""|LoRA - weighted sum| over |LoRA| below which it counts as a merge: re-factored merges are inexact."""


@dataclass(frozen=True)
class Merge:
    """A LoRA as a weighted sum of others.

    Attributes:
        name: of the LoRA.
        parts: (name, weight) of each part, the largest first.
        residual: |LoRA - sum| / |LoRA|.
    """

    name: str
    parts: tuple[tuple[str, float], ...]
    residual: float

    def __str__(self) -> str:
        terms = " + ".join(f"{weight:.2f} {name}" for name, weight in self.parts)
        return f"{self.name} is {terms}, except for {self.residual:.0%}"


def merge_of(row: torch.Tensor, others: torch.Tensor, name: str, names: Sequence[str]) -> Merge | None:
    """The weighted sum of at most ``MOST`` other LoRAs that is nearest to a LoRA; None if it is not a merge.

    Orthogonal matching pursuit (Pati et al. 1993): the LoRA most similar to the residual is added, then all weights are
    refitted by least squares.

    Args:
        row: (D,) the LoRA's sketch (see :func:`~vitrine.engine.w2w.loras.near_copies.sketch`).
        others: (N, D) the sketches of the others, without copies of it.
    """
    length, lengths = float(row.norm()), others.norm(dim=1)
    usable = (lengths > 0).nonzero()[:, 0].tolist()
    if not length or len(usable) < 2:
        return None
    target, table = row.double(), others.double()
    chosen: list[int] = []
    weights, missing = torch.zeros(0, dtype=torch.float64), target
    while len(chosen) < min(MOST, len(usable)) and float(missing.norm()) > NEAR / 10 * length:
        alike = (table @ missing).abs() / lengths.double().clamp_min(1e-30)
        alike[[i for i in range(len(table)) if i not in usable or i in chosen]] = -1
        chosen.append(int(alike.argmax()))
        weights = torch.linalg.lstsq(table[chosen].T, target[:, None]).solution[:, 0]
        missing = target - weights @ table[chosen]
    residual = float(missing.norm()) / length
    # the contribution of each weight, relative to the LoRA's norm
    sizes = weights.abs() * lengths[chosen].double() / length
    parts = sorted(zip(chosen, weights.tolist(), sizes.tolist(), strict=True), key=lambda part: -part[2])
    shown = tuple((names[i], round(w, 3)) for i, w, size in parts if size >= LEAST)
    return Merge(name, shown, round(residual, 4)) if residual <= RESIDUAL and len(shown) > 1 else None


MOST_FILES = 300
"""Most files that are compared with one LoRA, the first by name."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of one LoRA.

    Attributes:
        compared: number of LoRAs of the same base model that it was compared with.
        left_out: number of files that could not be compared: of another base model, or not readable as a LoRA.
        copies: pairs of near-duplicates that it is in.
        merge: the weighted sum of others that it equals, if any.
        alike: (name, cosine of weight updates) of the nearest, at most five.
    """

    compared: int = 0
    left_out: int = 0
    copies: tuple[Copy, ...] = ()
    merge: Merge | None = None
    alike: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        merge = None if self.merge is None else {"parts": self.merge.parts, "residual": self.merge.residual}
        return {
            "compared": self.compared,
            "left_out": self.left_out,
            "copies": [copy.to_dict() for copy in self.copies],
            "merge": merge,
            "alike": [[name, round(cosine, 4)] for name, cosine in self.alike],
        }


def neighbours_in(file: LoraFile, others: Sequence[Path]) -> Neighbours:
    """Neighbours of a LoRA among other files; each is read once, one in memory at a time."""
    own = read_lora(file)
    paths = [p for p in others if p.resolve() != file.path.resolve()][:MOST_FILES]
    scan = scan_folder([file.path, *(path for path in paths if _same_base(file, path))], fewest=0)
    usable = [f for f in scan.good if f.path != file.path]
    if file.path not in {f.path for f in scan.good}:
        return Neighbours(0, len(paths))
    shapes = {path: entry.outer for path, entry in file.entries.items()} | scan.shapes
    side = max(2, min(64, math.isqrt(NUMBERS // len(shapes))))
    row, rows, names = sketch(own, shapes, side), [], []
    for other in usable:
        lora, _ = read_or_problem(other)
        if lora is not None:
            rows.append(sketch(lora, shapes, side))
            names.append(other.name)
    if not rows:
        return Neighbours(0, len(paths))
    table = torch.stack(rows)
    name = next(f.name for f in scan.good if f.path == file.path)
    pairs = near_copies(torch.cat([row[None], table]), [name, *names])
    copies = tuple(pair for pair in pairs if name in (pair.first, pair.second))
    twins = {n for pair in copies for n in (pair.first, pair.second)}
    kept = [i for i, n in enumerate(names) if n not in twins]
    merge = merge_of(row, table[kept], name, [names[i] for i in kept]) if kept else None
    cosines = torch.nn.functional.cosine_similarity(table, row[None])
    order = cosines.argsort(descending=True)[:5].tolist()
    alike = tuple((names[i], float(cosines[i])) for i in order)
    return Neighbours(len(rows), len(paths) - len(rows), copies, merge, alike)


def _same_base(file: LoraFile, path: Path) -> bool:
    """Whether another file is a LoRA with layers of this one, all of the same sizes: each base model is a group."""
    try:
        entries = read_header(path).entries
    except VitrineError:
        return False
    shared = file.entries.keys() & entries.keys()
    return bool(shared) and all(file.entries[layer].outer == entries[layer].outer for layer in shared)


def files_to_compare(files: Sequence[Path], folder: Path | None) -> list[Path]:
    """Files to compare with: of a folder and its subfolders, or of the report."""
    paths = list(files) if folder is None else [*files_in(folder, ".safetensors", deep=True), *files]
    return list({p.resolve(): p for p in paths}.values())


def names_of(files: Sequence[Path]) -> list[str]:
    """A unique name per file of a report."""
    names = [printable(name).replace("/", " ") for name in distinct_names(list(files))]
    return [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
